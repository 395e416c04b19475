"""What is found wrong with the engines of engine.urls before anything loads."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import shlex
import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from skylite.config.engine import EngineConfig
from skylite.config.lora import LoraConfig
from skylite.config.train import RunConfig
from skylite.engine.connections import Address
from skylite.engine.interface import ServerFacts
from skylite.engine.url_engines import check_url_engine
from skylite.engine.vllm import models
from skylite.engine.vllm.launcher import VllmLauncher, stock_command
from skylite.errors import ConfigError, ModelError
from skylite.rollout.engine_check import check_engines
from skylite.rollout.plan import write_run
from skylite.rollout.resume import check_changes, plan_resume
from skylite.rollout.trusted_programs import allow_engines
from tests.decisions import resolved
from tests.fakes.vllm_server import VllmStub, vllm_servers
from tests.settings import typed
from tests.small_run import settings
from tests.tiny_models import tiny_tokenizer
from tests.unit.engine_cases import SPEC
from tests.unit.test_dry_run import plan


def check(stub: VllmStub, model: Path, adapters: Path, token: str | None = None, **lora: Any) -> ServerFacts:
    spec = replace(SPEC, name=f"engine-0 at {stub.url}", model_path=model, address=Address(stub.url, token))
    return asyncio.run(check_url_engine(VllmLauncher(), spec, adapters, LoraConfig(**lora)))


def test_a_server_that_fits_is_described_and_left_as_it_was(tmp_path: Path, tiny_llama: Path) -> None:
    """The probe lies in the closest folder that exists, which the run's adapters will be below."""
    with vllm_servers(token="sesame") as (stub,):
        facts = check(stub, tiny_llama, tmp_path / "run" / "adapters", "sesame")
        assert stub.adapters == {}
    assert facts.base_name == "/models/base"
    (text,) = map(str, facts.notes)
    assert text == (
        f"engine-0 at {stub.url}: vLLM 0.32.0 serves /models/base, up to 8,192 tokens, and loads the run's "
        "adapters"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"token": "another"}, r"asks for a key, and gets none by engine.key_env \(HTTP 401\)"),
        ({"runtime_lora": False}, r"cannot load adapters .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python -m"),
        ({"max_model_len": 511}, r"takes 511 tokens, .* may have 512\. Start it with --max-model-len 512"),
        (
            {"max_lora_rank": 8},
            r"no LoRA of rank 16: .* Start it with --max-lora-rank 16, or lower lora.rank",
        ),
        ({"max_loras": 1}, r"samples from 1 adapter\(s\) at once, .* 2 .*--max-loras 2 --max-cpu-loras 3"),
        ({"processed": False}, r"before temperature, .*Start it with --logprobs-mode processed_logprobs"),
        ({"hidden": Path("/")}, r"does not see the run's folder of adapters, /.* at the same path"),
    ],
)
def test_what_is_missing_is_one_sentence(
    tmp_path: Path, tiny_llama: Path, faults: dict[str, Any], words: str
) -> None:
    with vllm_servers(**faults) as (stub,), pytest.raises(ConfigError, match=words) as refusal:
        check(stub, tiny_llama, tmp_path, rank=16)
    assert str(refusal.value).startswith(f"engine-0 at {stub.url} ")
    assert "\n" not in str(refusal.value)
    assert stub.adapters == {}
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_key_and_what_is_no_vllm_are_refused(tmp_path: Path, tiny_llama: Path) -> None:
    with (
        vllm_servers(token="sesame") as (stub,),
        pytest.raises(ConfigError, match="refuses the key of") as no,
    ):
        check(stub, tiny_llama, tmp_path, "wrong")
    assert "wrong" not in str(no.value)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        stub.url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ConfigError, match=r"ConnectError.*Start it so, or leave it out of engine.urls: VLLM"):
        check(stub, tiny_llama, tmp_path)
    with vllm_servers() as (stub,):
        stub.url += "/elsewhere"
        with pytest.raises(ConfigError, match=r"does not answer as vLLM: /v1/models \(HTTP 404\)"):
            check(stub, tiny_llama, tmp_path)


def test_another_version_is_a_warning_but_not_for_what_it_would_compute_wrongly(
    tmp_path: Path, tiny_llama: Path
) -> None:
    with vllm_servers(version="0.26.0") as (stub,):
        (_, note) = check(stub, tiny_llama, tmp_path).notes
        assert note.is_warning
        assert f"vLLM 0.26.0 is not the tested {models.tested_version()}" in note.text
        with pytest.raises(ModelError, match=r"vLLM 0.26.0 was not tested with lora.rank_pattern"):
            check(stub, tiny_llama, tmp_path, rank_pattern={"q_proj": 4})


def own_ca(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Certificates of 127.0.0.1, signed by themselves: their file, and the server's context."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skylite test")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, secret = folder / "ca.pem", folder / "key.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, secret)
    return pem, context


def test_https_needs_the_authority_that_signed_it(tmp_path: Path, tiny_llama: Path) -> None:
    pem, context = own_ca(tmp_path)
    with vllm_servers(context=context) as (stub,):
        spec = replace(SPEC, model_path=tiny_llama, address=Address(stub.url))
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
            asyncio.run(check_url_engine(VllmLauncher(), spec, tmp_path, LoraConfig()))
        known = replace(spec, address=Address(stub.url, None, str(pem)))
        assert asyncio.run(check_url_engine(VllmLauncher(), known, tmp_path, LoraConfig())).notes
        for useless in (tmp_path / "none.pem", tmp_path / "key.pem"):
            wrong = replace(spec, address=Address(stub.url, None, str(useless)))
            with pytest.raises(ConfigError, match=r"engine.ca_file=.* holds no certificates"):
                asyncio.run(check_url_engine(VllmLauncher(), wrong, tmp_path, LoraConfig()))


def test_a_plan_asks_the_engines_starts_none_and_records_no_key(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "sesame")
    with vllm_servers(2, token="sesame", tokenizer=tiny_tokenizer()) as stubs:
        engine = {"urls": [f"{stub.url}/v1" for stub in stubs], "key_env": "THEIR_KEY"}
        planned = plan(tmp_path, tiny_llama, engine=engine)
        notes = list(map(str, planned.resolved.notes))
        write_run(planned)
        found = check_engines(plan_resume(planned.run).run_config)
        monkeypatch.delenv("THEIR_KEY")
        with pytest.raises(ConfigError, match=r"engine.key_env=THEIR_KEY names a variable that is not set"):
            check_engines(planned.run_config)
    assert planned.config.engine.num_engines == 0
    assert not any("engine(s)" in note for note in notes), "no memory for engines"
    assert [note for note in notes if "vLLM 0.32.0 serves" in note] == list(map(str, found))
    assert len(found) == 2
    recorded = planned.run.config_path.read_text()
    assert "THEIR_KEY" in recorded
    assert "sesame" not in recorded


def test_another_tokenizer_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    class Shifted:
        """One id further."""

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [i + 1 for i in tiny_tokenizer().encode(text, add_special_tokens=False)]

    with (
        vllm_servers(tokenizer=Shifted()) as (stub,),
        pytest.raises(
            ConfigError, match=r"engine-0 at .* has another tokenizer than .*: it reads 'The answer"
        ),
    ):
        plan(tmp_path, tiny_llama, engine={"urls": [stub.url]})


def test_what_a_stock_server_would_do_wrong_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    engine = {"urls": ["http://127.0.0.1:9"]}
    judged = settings(engine=engine, reward={"functions": ["judge"], "judge": {"url": "base"}})
    for config, images, words in (
        (settings(engine=engine), 1, "prompts have images, which the engines of engine.urls do not get"),
        (judged, 0, "reward.judge.url=base asks the base while adapters sample"),
    ):
        decided = resolved(tiny_llama, tmp_path, model={"max_images": images})
        run_config = RunConfig(skylite_version="1", config=config, resolved=decided)
        with pytest.raises(ConfigError, match=words):
            check_engines(run_config)


def test_settings_of_engines_elsewhere_that_mean_nothing_are_refused() -> None:
    url = "http://10.0.0.1:8000"
    for wrong, words in (
        ({"urls": ["10.0.0.1:8000"]}, "not the address of a server"),
        ({"urls": ["http://me:secret@10.0.0.1"]}, "belongs into the variable of engine.key_env"),
        ({"urls": [url, url]}, "names http://10.0.0.1:8000 twice"),
        ({"urls": [url], "min_engines": 2}, "engine.min_engines=2 is more than the 1 of engine.urls"),
        ({"key_env": "KEY"}, "engine.key_env=KEY is for the engines of engine.urls, which is empty"),
    ):
        with pytest.raises(ValidationError, match=words):
            EngineConfig.model_validate(wrong)
    with pytest.raises(ValidationError, match=r"algorithm.name=sft samples nothing, so it has no engines"):
        settings(algorithm={"name": "sft"}, engine={"urls": [url]})


def test_a_resume_may_name_other_engines_and_a_command_with_its_own_engine_none() -> None:
    old = settings(engine={"urls": ["http://10.0.0.1:8000"], "min_engines": 1})
    others = {"urls": ["http://10.0.0.2:8000", "http://10.0.0.3:8000"], "key_env": "KEY", "min_engines": 2}
    check_changes(old, settings(engine=others))
    check_changes(old, settings())
    own = settings(engine=others).as_sampled().engine
    assert (own.num_engines, own.urls, own.key_env) == (1, [], "")


def test_prompts_go_to_engines_that_only_a_file_names_after_you_have_named_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = settings(engine={"urls": ["http://10.0.0.1:8000"], "key_env": "KEY"})
    by_file = replace(typed({}), file=Path("recipe.toml"))
    with pytest.raises(
        ConfigError, match=r"recipe.toml sends prompts, completions and the key in KEY to the"
    ):
        allow_engines(config, by_file)
    allow_engines(config, typed({"engine.urls": config.engine.urls, "engine.key_env": "KEY"}))
    allow_engines(config, by_file)


def test_the_how_to_has_the_command_of_the_messages() -> None:
    """That for the recipe gsm8k_cpu."""
    spec = replace(
        SPEC,
        address=Address("http://127.0.0.1:8001"),
        max_loras=1,
        max_model_len=544,
        target_modules=["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    )
    page = Path(__file__).parents[2] / "docs" / "how-to" / "engines.md"
    block = page.read_text().partition("    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True")[2].partition("\n\n")[0]
    words = shlex.split(stock_command(spec))
    assert [words[0], *shlex.split(block.replace("\\\n", ""))] == [
        "MODEL" if word == str(SPEC.model_path) else word for word in words
    ]
    assert {"--enable-lora", "--logprobs-mode", "--max-lora-rank"} <= set(words)
    on_gpu = shlex.split(stock_command(replace(spec, device="cuda", dtype="bfloat16", gpus=(0,))))
    assert on_gpu[1:4] == ["vllm", "serve", str(SPEC.model_path)]
