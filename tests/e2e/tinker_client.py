"""A user of Tinker's own client, in a process of its own: `tinker_client.py SCENARIO URL KEY MODEL [WORD]`.

Prints what it found as a line of JSON. It knows nothing of skylite.
"""

from __future__ import annotations

import json
import math
import sys
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types

TEXTS = ["the cat sat on the mat", "a dog ran over the hill", "the cat ran", "two boats sail"]
Ids = list[int]


def datum(ids: Ids, **inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **inputs}
    )


def sft(client: tinker.ServiceClient, model: str, word: str) -> dict[str, Any]:
    """Four updates on four texts. `word` is the seed."""
    trainer = client.create_lora_training_client(base_model=model, rank=4, seed=int(word)).result()
    tokenizer = trainer.get_tokenizer()
    texts = [tokenizer.encode(text) for text in TEXTS]
    data = [datum(ids, weights=[0.0] * 3 + [1.0] * (len(ids) - 4)) for ids in texts]
    losses, norms = [], []
    for _ in range(4):
        done = trainer.forward_backward(data, "cross_entropy")
        step = trainer.optim_step(types.AdamParams(learning_rate=5e-3, eps=1e-8))
        losses.append(done.result().metrics["loss:sum"])
        norms.append(step.result().metrics["grad_norm"])
    logprobs = [
        x["logprobs"].tolist() for x in trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    ]
    state = trainer.save_state("end").result().path
    again = client.create_training_client_from_state_with_optimizer(state).result()
    loaded = [x["logprobs"].tolist() for x in again.forward(data, "cross_entropy").result().loss_fn_outputs]
    return {"losses": losses, "norms": norms, "texts": texts, "logprobs": logprobs, "loaded": loaded} | {
        "state": state,
        "model": trainer.model_id,
        "rank": trainer.get_info().lora_rank,
    }


def fetch(client: tinker.ServiceClient, trainer: tinker.TrainingClient, folder: Path) -> None:
    """The policy's adapter as files."""
    path = trainer.save_weights_external("files").result().path
    urls = client.create_rest_client().get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        (folder / name).write_bytes(urllib.request.urlopen(url).read())


def start(client: tinker.ServiceClient, model: str, word: str) -> dict[str, Any]:
    """What policies of the seed 7 start with, as folders in `word`."""
    for rank in (8, 32):
        trainer = client.create_lora_training_client(base_model=model, rank=rank, seed=7).result()
        (folder := Path(word, f"rank-{rank}")).mkdir()
        fetch(client, trainer, folder)
    return {}


def download(client: tinker.ServiceClient, model: str, word: str) -> dict[str, Any]:
    """One update, and its adapter as files in the folder `word`."""
    trainer = client.create_lora_training_client(base_model=model, rank=2, seed=1, train_attn=False).result()
    ids = trainer.get_tokenizer().encode(TEXTS[0])
    data = [datum(ids, weights=[1.0] * (len(ids) - 1))]
    trainer.forward_backward(data, "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    fetch(client, trainer, Path(word))
    result = trainer.forward(data, "cross_entropy").result()
    return {"ids": ids, "logprobs": result.loss_fn_outputs[0]["logprobs"].tolist()}


def rl(client: tinker.ServiceClient, model: str, word: str) -> dict[str, Any]:
    """Steps of sampling, rewards, advantages and importance sampling. The reward: letters a to m."""
    trainer = client.create_lora_training_client(base_model=model, rank=8, seed=3).result()
    tokenizer = trainer.get_tokenizer()
    prompt, rewards, gaps = tokenizer.encode("say: "), [], []
    for step in range(int(word)):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=10, temperature=1.0, seed=100 * step)
        sampled = sampler.sample(types.ModelInput.from_ints(prompt), 16, params).result().sequences
        scores = [sum(97 <= t < 110 for t in s.tokens) / 10 for s in sampled]
        mean = sum(scores) / len(scores)
        rewards.append(mean)
        data = []
        for sequence, score in zip(sampled, scores, strict=True):
            first = len(prompt) - 1
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": [0] * first + sequence.tokens,
                        "logprobs": [0.0] * first + list(sequence.logprobs),
                        "advantages": [0.0] * first + [score - mean] * len(sequence.tokens),
                    },
                )
            )
        done = trainer.forward_backward(data, "importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=2e-2, eps=1e-8))
        for one, output in zip(data, done.result().loss_fn_outputs, strict=True):
            mine, theirs = output["logprobs"].tolist(), one.loss_fn_inputs["logprobs"].tolist()
            gaps += [abs(a - b) for a, b in zip(mine, theirs, strict=True) if b]
    tokens = types.ModelInput.from_ints(prompt)
    full = sampler.compute_logprobs(tokens).result()
    answer = sampler.sample(
        tokens, 1, types.SamplingParams(max_tokens=3, temperature=0.0, stop=[]),
        include_prompt_logprobs=True, topk_prompt_logprobs=3,
    ).result()  # fmt: skip
    stopped = sampler.sample(tokens, 4, types.SamplingParams(max_tokens=40, seed=5, stop=["e", "a"])).result()
    texts = [(tokenizer.decode(s.tokens), s.stop_reason) for s in stopped.sequences]
    return {"rewards": rewards, "gap": max(gaps), "full": full, "top": answer.topk_prompt_logprobs} | {
        "again": answer.prompt_logprobs,
        "greedy": answer.sequences[0].tokens,
        "texts": texts,
    }


def dpo(client: tinker.ServiceClient, model: str, word: str) -> dict[str, Any]:
    """DPO through forward_backward_custom: the client computes the loss, in two passes."""
    trainer = client.create_lora_training_client(base_model=model, rank=4, seed=9).result()
    tokenizer = trainer.get_tokenizer()
    pairs = [("Q: up? A:", " yes", " no"), ("Q: down? A:", " no", " yes")]
    data, lengths = [], []
    for prompt, good, bad in pairs:
        for reply in (good, bad):
            ids = tokenizer.encode(prompt + reply)
            lengths.append(len(tokenizer.encode(reply)))
            data.append(datum(ids, weights=[1.0] * (len(ids) - 1)))
    start = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    ref = [float(x["logprobs"].to_torch()[-n:].sum()) for x, n in zip(start, lengths, strict=True)]

    def loss(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        sums = [x[-n:].sum() for x, n in zip(logprobs, lengths, strict=True)]
        margins = [(sums[i] - ref[i]) - (sums[i + 1] - ref[i + 1]) for i in range(0, len(sums), 2)]
        margin = torch.stack(margins)
        return -torch.nn.functional.logsigmoid(0.5 * margin).sum(), {"margin": float(margin.detach().mean())}

    steps = []
    for _ in range(4):
        done = trainer.forward_backward_custom(data, loss)
        trainer.optim_step(types.AdamParams(learning_rate=3e-3, eps=1e-8))
        steps.append(done.result().metrics)
    return {"losses": [s["loss:sum"] for s in steps], "margins": [s["margin"] for s in steps]}


def steal(client: tinker.ServiceClient, model: str, word: str) -> dict[str, Any]:
    """Use what another user has saved."""
    try:
        client.create_training_client_from_state(word).result()
    except tinker.NotFoundError as error:
        return {"error": str(error)}
    return {}


def main() -> None:
    warnings.simplefilter("ignore")
    scenario, url, key, model, word = sys.argv[1:6]
    client = tinker.ServiceClient(base_url=url, api_key=key)
    found = globals()[scenario](client, model, word)
    client.close("success").result()
    assert not any(isinstance(x, float) and math.isnan(x) for x in found.values())
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
