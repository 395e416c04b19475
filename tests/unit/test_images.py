"""Images in the trainer: its logprobs are those of transformers' model with its processor's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from skylite.adapters.folder import find_adapter
from skylite.adapters.import_adapter import adopt_adapter
from skylite.adapters.manifest import Canary, CanaryImage
from skylite.adapters.target_modules import check_target_names, last_names, predict_modules
from skylite.config.lora import LoraConfig
from skylite.config.train import RunConfig, TrainConfig
from skylite.data.chat_tokenizer import load_tokenizer
from skylite.data.images import with_parts
from skylite.engine.canary import with_picture
from skylite.engine.model_limits import check_unfrozen
from skylite.engine.model_sizes import model_sizes
from skylite.engine.vllm.plugin.no_torchvision import skip_videos
from skylite.errors import ConfigError, DataError, ModelError
from skylite.export.canary_check import model_logprobs
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, adapted_modules, score
from skylite.model.process_group import Dist
from skylite.run.rollout_file import read_examples, read_rollouts, write_rollouts
from skylite.trainer.canary import base_canary_logprobs, canary_logprobs
from skylite.trainer.publish_adapter import write_adapter
from skylite.types import Call, Group, ImageTokens, TrainingExample, Trajectory
from tests.cases import policy_of
from tests.decisions import resolved
from tests.pictures import picture, prompt
from tests.small_run import lone_rank, settings
from tests.tiny_models import IMAGE_TOKEN, READS_IMAGES, VIDEO_TOKEN, make_tiny_model
from tests.unit.test_text_model import plain_peft

COMPLETIONS = [[65, IMAGE_TOKEN, 67, 258], [65, IMAGE_TOKEN, 70]]
"""A policy may sample the image token, which means no image there."""
UNFROZEN = {"freeze_vision": False, "freeze_projection": False}


PROMPTS = [
    prompt("<image>What is <image>this?", picture(1, 40, 24), picture(2, 17, 60)),
    # The same tokens with other pixels, first in the second image, then in the first.
    prompt("<image>What is <image>this?", picture(1, 40, 24), picture(3, 17, 60)),
    prompt("<image>What is <image>this?", picture(4, 40, 24), picture(2, 17, 60)),
    prompt("Nothing to see."),
]


@pytest.fixture(scope="module", params=READS_IMAGES)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def dist() -> Iterator[Dist]:
    with lone_rank() as dist:
        yield dist


@pytest.fixture(scope="module")
def examples(model_path: Path) -> list[TrainingExample]:
    """Each prompt with each completion."""
    tokenizer = load_tokenizer(model_path)
    try:
        encoded = tokenizer.encode(PROMPTS)
        with pytest.raises(ModelError, match="2 places of images for 1 images"):
            tokenizer.encode([prompt("<image>Not <|image_pad|>", picture(1, 8, 8))])
    finally:
        tokenizer.close()
    return [
        TrainingExample(
            token_ids=np.array([*found.token_ids, *completion], dtype=np.int64),
            weights=np.array([0] * len(found.token_ids) + [1] * len(completion), dtype=np.float32),
            group=group,
            trajectory=index,
            images=found.images,
        )
        for group, found in enumerate(encoded)
        for index, completion in enumerate(COMPLETIONS)
    ]


def plain_logprobs(
    model_path: Path, policy: Policy, examples: Sequence[TrainingExample]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs and the gradient of their sum, by transformers alone: its processor makes every input.

    transformers refuses an image token without an image. The video token stands for a sampled one here, with
    the same embedding.
    """
    skip_videos()
    base = AutoModelForImageTextToText.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager"
    )
    embeddings = base.get_input_embeddings().weight.data
    embeddings[VIDEO_TOKEN] = embeddings[IMAGE_TOKEN]
    model, processor = plain_peft(base, policy), AutoProcessor.from_pretrained(model_path)
    found = []
    for example in examples:
        of = PROMPTS[example.group]
        text = processor.apply_chat_template(
            with_parts(of.messages), add_generation_prompt=True, tokenize=False
        )
        images = [Image.open(BytesIO(data)) for data in of.images] or None
        inputs = processor(text=[text], images=images, return_tensors="pt")
        made = inputs["input_ids"][0].tolist()
        assert example.token_ids[: len(made)].tolist() == made, "skylite makes other tokens of the prompt"
        completion = torch.from_numpy(example.token_ids[len(made) :])
        shown = torch.where(completion == IMAGE_TOKEN, VIDEO_TOKEN, completion)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], shown[None]], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        types = torch.zeros_like(inputs["input_ids"])
        types[:, : len(made)] = inputs["mm_token_type_ids"]
        logits = model(**{**inputs, "mm_token_type_ids": types}).logits[0, len(made) - 1 : -1]
        found.append(logits.log_softmax(-1)[torch.arange(len(completion)), completion])
    logprobs = torch.cat(found)
    logprobs.sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [{}, UNFROZEN], ids=["frozen", "unfrozen"])
def test_logprobs_and_gradients_are_those_of_transformers_with_its_processors_inputs(
    lora: dict[str, bool], model_path: Path, examples: list[TrainingExample], dist: Dist
) -> None:
    config = settings(lora=lora)
    policy = policy_of(model_path, config, dist)
    expected, gradients = plain_logprobs(model_path, policy, examples)
    assert gradients.keys() == policy.lora.keys()
    on_tower = [name for name in gradients if ".visual." in name]
    assert bool(on_tower) == bool(lora), "the tower has LoRA only if it is not frozen"
    assert all(gradients[name].abs().max() > 0 for name in on_tower)
    assert policy.packing == "tree"
    by_prompt = expected.view(len(PROMPTS), -1)
    assert (by_prompt[0] - by_prompt[1:3]).abs().amax(1).min() > 0.01, "the pixels of each image matter"
    padded = policy_of(model_path, config, dist, "padded")
    found, _ = score(padded, pack_tokens(examples, "padded", policy.device, padded.images), temperature=1.0)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    found, _ = score(policy, pack_tokens(examples, "tree", policy.device, policy.images), temperature=1.0)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    found.sum().backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(policy.lora[name].grad, gradient, atol=1e-5, rtol=1e-4)


def test_the_frozen_parts_have_no_lora_and_headers_give_the_same_names(model_path: Path) -> None:
    base = AutoModelForImageTextToText.from_pretrained(model_path)
    linear = {n for n, m in base.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    tower = {name for name in linear if name.startswith("model.visual.blocks.")}
    projection = {name for name in linear if name.startswith("model.visual.") and name not in tower}
    assert len(tower) >= 8
    assert len(projection) >= 2
    for lora, left_out in (
        ({}, tower | projection),
        ({"freeze_vision": False}, projection),
        ({"freeze_projection": False}, tower),
        (UNFROZEN, set()),
    ):
        config = LoraConfig.model_validate(lora)
        adapted = adapted_modules(base, config)
        assert set(adapted) == linear - left_out == predict_modules(model_path, config)[1]
        assert model_sizes(model_path, config).lora_per_rank == sum(
            sum(base.get_submodule(name).weight.shape) for name in adapted
        )
    named = LoraConfig(target_modules=["qkv", "q_proj"], freeze_vision=False)
    assert last_names(adapted_modules(base, named)) == ["q_proj", "qkv"]
    paths = LoraConfig(target_modules=["attn.proj"], freeze_vision=False)
    assert last_names(adapted_modules(base, paths)) == [f"model.visual.blocks.{i}.attn.proj" for i in (0, 1)]


def test_unfrozen_parts_without_images_or_without_a_target_are_refused(
    model_path: Path, tmp_path: Path
) -> None:
    lora = LoraConfig(freeze_projection=False)
    check_unfrozen(model_path, lora, max_images=1)
    with pytest.raises(ModelError, match=r"lora.freeze_projection=false, and no prompt has an image"):
        check_unfrozen(model_path, lora, max_images=0)
    gemma = make_tiny_model(tmp_path / "gemma3_vl", "gemma3_vl")
    with pytest.raises(ModelError, match=r"trains Qwen2.5-VL and Qwen3-VL on images, not gemma3_vl"):
        check_unfrozen(gemma, lora, max_images=1)
    only_text = LoraConfig(freeze_vision=False, target_modules=["q_proj"])
    with pytest.raises(ModelError, match=r"freeze_vision=false, and .* names no module there.*proj, qkv"):
        check_target_names(model_path, only_text)


@pytest.mark.parametrize("lora", [{}, {"freeze_projection": False}], ids=str)
def test_a_run_takes_over_which_parts_an_adapter_changes(
    lora: dict[str, bool], model_path: Path, tmp_path: Path, dist: Dist
) -> None:
    config = settings(lora=lora)
    policy = policy_of(model_path, config, dist)
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(model_path, tmp_path))
    canary = Canary(sequences=[], policy_logprobs=[], base_logprobs=[])
    folder = write_adapter(policy, run_config, 1, canary).path
    plain = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(model_path), str(folder))
    loaded = {
        name.replace(".weight", ".default.weight"): t
        for name, t in load_file(folder / "adapter_model.safetensors").items()
    }
    own = {name: tensor for name, tensor in plain.named_parameters() if ".lora_" in name}
    assert own.keys() == loaded.keys()
    assert all(torch.equal(own[name], loaded[name]) for name in own), "PEFT finds a place for each"

    assert find_adapter(folder, None).is_on_tower == bool(lora)
    start = settings(lora={"from_adapter": str(folder)})
    adopted, _ = adopt_adapter(start, [], model_path)
    assert adopted.lora.unfrozen == config.lora.unfrozen
    assert predict_modules(model_path, adopted.lora) == predict_modules(model_path, config.lora)
    if lora:
        with pytest.raises(ConfigError, match="has freeze_projection false, but this run uses true"):
            adopt_adapter(start, ["lora.freeze_projection"], model_path)


def test_a_canary_with_a_picture_shows_an_adapter_on_the_tower(model_path: Path, dist: Dist) -> None:
    tokenizer = load_tokenizer(model_path)
    try:
        sequences, image = with_picture(tokenizer, [[65, 66, 67], [68, 69, 70, 71]])
    finally:
        tokenizer.close()
    assert sequences[0][-3:] == [65, 66, 67]
    assert sequences[0][:-3] == sequences[1][:-4]
    assert set(sequences[0][1 : 1 + image.length]) == {IMAGE_TOKEN}
    assert image.length == len(sequences[0]) - 5
    stored = CanaryImage.model_validate_json(CanaryImage.of(image).model_dump_json()).tokens
    assert stored == image

    policy = policy_of(model_path, settings(lora={"freeze_vision": False}), dist)
    for name, param in policy.lora.items():
        if "lora_B" in name and ".visual." not in name:
            param.data.zero_()
    with_tower = np.concatenate(canary_logprobs(policy, sequences, image))
    base = np.concatenate(base_canary_logprobs(policy, sequences, image))
    assert np.abs(with_tower - base).max() > 0.01
    texts = [s[-3:] for s in sequences]
    assert canary_logprobs(policy, texts) == base_canary_logprobs(policy, texts), "text alone shows nothing"

    base_model = AutoModelForImageTextToText.from_pretrained(model_path, dtype=torch.float32).eval()
    plain = model_logprobs(base_model, sequences, CanaryImage.of(image), model_path)
    np.testing.assert_allclose(np.concatenate(plain), base, atol=2e-5)


def test_nodes_are_shared_where_the_pixels_are_equal(
    model_path: Path, examples: list[TrainingExample], dist: Dist
) -> None:
    policy = policy_of(model_path, settings(), dist)

    def nodes(*chosen: TrainingExample) -> int:
        return pack_tokens(chosen, "tree", policy.device, policy.images).num_nodes

    first, same, second_differs, first_differs = examples[0], examples[1], examples[2], examples[4]
    length = len(first.token_ids) - 1
    begins = [image.start for image in first.images]
    assert nodes(first) == length
    assert nodes(first, same) == length, "the shorter one is a prefix, but for its last token"
    assert nodes(first, second_differs) == 2 * length - begins[1]
    assert nodes(first, first_differs) == 2 * length - begins[0]


def test_the_tower_computes_each_different_image_once(
    model_path: Path, examples: list[TrainingExample], dist: Dist
) -> None:
    policy = policy_of(model_path, settings(), dist)
    assert policy.images is not None
    seen: list[int] = []
    policy.images.model.visual.register_forward_hook(
        lambda _, __, kwargs, ___: seen.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    score(policy, pack_tokens(examples, "tree", policy.device, policy.images), temperature=1.0)
    score(policy, pack_tokens(examples[-2:], "tree", policy.device, policy.images), temperature=1.0)
    assert seen == [4], "images 1, 2, 3 and 4 in one call, and none without images"


def test_a_rollout_file_holds_each_groups_images_once(tmp_path: Path) -> None:
    data = picture(1, 64, 64)
    images = (ImageTokens(1, 2, data),)
    call = Call(
        prompt_token_ids=[1, 9, 9, 2], completion_token_ids=[3], sampling_logprobs=[-1.0], images=images
    )
    group = Group(prompt=prompt("<image>?", data), trajectories=(Trajectory(calls=(call,), reward=1.0),) * 4)
    path = tmp_path / "step.parquet"
    write_rollouts(path, [group, group])
    read = read_examples(path)
    assert [e.images for e in read] == [images] * 8
    assert len({id(e.images[0].data) for e in read}) == 2
    assert [t.calls[0].images for g in read_rollouts(path) for t in g.trajectories] == [images] * 8
    table = pq.read_table(path)
    rows = table.to_pylist()
    for damage in (None, {"start": 4, "length": 9, "data": data}, {"start": 1, "length": 2, "data": None}):
        rows[0]["images"] = [damage]
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), tmp_path / "damaged.parquet")
        with pytest.raises(DataError, match="has an image without a file or outside its prompt"):
            read_examples(tmp_path / "damaged.parquet")
    key = images[0].key
    assert read[0].keys.tolist() == [1, key, key, 2, 3]
    assert key < 0
    assert path.read_bytes().count(data) <= 2


def test_an_adapter_of_text_alone_needs_no_reader(tmp_path: Path, dist: Dist) -> None:
    config: TrainConfig = settings()
    model: Any = make_tiny_model(tmp_path / "gemma3_vl", "gemma3_vl")
    assert policy_of(model, config, dist).images is None
