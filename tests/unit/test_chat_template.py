"""data.chat_template and data.template_args: they change the prompt ids wherever prompts are rendered."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from skylite.adapters.folder import ServedAdapter
from skylite.cli.eval import chosen_template
from skylite.config.loading import change_config
from skylite.config.provenance import NOTHING_TYPED
from skylite.config.rollout import DataConfig
from skylite.config.train import RunConfig
from skylite.data.chat_tokenizer import (
    MAX_BYTES,
    ChatTemplate,
    load_tokenizer,
    read_template,
    text_for_others,
)
from skylite.data.prompts import read_prompts
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.errors import ConfigError, ModelError
from skylite.export.weights import write_template
from skylite.run.run_dir import AdapterVersion
from skylite.types import Message
from tests.decisions import resolved
from tests.prepared import prepare
from tests.settings import load_config, typed
from tests.unit.bad_inputs import call, printed_json
from tests.unit.engine_cases import PUBLIC

THINKING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""As Qwen3's: without thinking, the prompt already holds an empty thought."""
CHAT: list[Message] = [{"role": "user", "content": "1 + 1?"}]


def rendered(text: str | None, model: Path, **args: bool | str) -> str:
    tokenizer = load_tokenizer(model, ChatTemplate(text=text, args=args))
    try:
        return str(AutoTokenizer.from_pretrained(model).decode(tokenizer.encode_chats([CHAT])[0]))
    finally:
        tokenizer.close()


def plain(text: str) -> str:
    return "".join(text.split())


def test_arguments_change_the_prompt_ids(tiny_llama: Path) -> None:
    thinking = rendered(THINKING, tiny_llama)
    assert rendered(THINKING, tiny_llama, enable_thinking=True) == thinking
    off = rendered(THINKING, tiny_llama, enable_thinking=False)
    assert off.startswith(thinking.rstrip())
    assert plain(off.removeprefix(thinking.rstrip())) == plain("<think></think>")
    # A text is not the value false.
    assert rendered(THINKING, tiny_llama, enable_thinking="false") == thinking


def test_a_template_file_replaces_that_of_the_model(tiny_llama: Path) -> None:
    text = "{% for m in messages %}Q {{ m.content }} A{% endfor %}"
    assert plain(rendered(text, tiny_llama)) == plain("Q 1 + 1? A")
    assert plain(rendered(None, tiny_llama)) != plain("Q 1 + 1? A")


def test_an_argument_that_the_template_does_not_use_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"names enable_thinkin, which data.chat_template does not use"):
        load_tokenizer(tiny_llama, ChatTemplate(text=THINKING, args={"enable_thinkin": False}))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("data.template_args.messages=1", "'messages' cannot be an argument .* skylite sets it"),
        ("data.template_args={'a b' = 1}", "'a b' cannot be an argument .* it is no name"),
        ("data.template_args.a=[1]", "data.template_args.a"),
        ("rollout.stop=['']", "rollout.stop.0"),
        ("rollout.stop=x", "rollout.stop"),
    ],
)
def test_bad_settings_are_named(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(None, {}, [setting])


def test_bad_template_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    for content, reason in (
        (None, "is not a file"),
        (b"\xff{", "cannot be read"),
        (b"no expression", "has no Jinja expression"),
        (b"{" * (MAX_BYTES + 1), f"is larger than {MAX_BYTES} bytes"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            read_template(DataConfig(chat_template=str(path)))


@pytest.fixture
def project(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tiny_llama)
    rows = [json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) for i in range(40)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    prepare("mine.jsonl", reward="math")
    (tmp_path / "thinking.jinja").write_text(THINKING)
    return tmp_path


DRY_RUN = [
    *["train", "--recipe", "gsm8k_cpu", "--model", "model", "--data", "data/mine"],
    *["--set", "eval.limit=0", "--dry-run"],
]


def test_own_data_needs_no_difficulty_with_the_default_cpu_recipe(project: Path) -> None:
    reply = call(DRY_RUN)
    assert reply.code == 0, reply.output
    assert printed_json(reply)["data"]["difficulty"] == []
    refused = call([*DRY_RUN, "--set", "data.difficulty=[1]"])
    assert refused.code == 2
    assert "has no row of difficulty [1]; it has [0]" in refused.output


def test_the_recipes_difficulty_counts_for_its_own_data(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = project / "elsewhere"
    prepare("gsm8k", synthetic=True, out=out, limit=200)
    reply = call([*DRY_RUN, "--data", "elsewhere"])
    assert reply.code == 0, reply.output
    assert printed_json(reply)["data"]["difficulty"] == [1]


@pytest.mark.parametrize("flags", [[], ["--reward", "countdown"]])
def test_countdown_is_ready_to_train(flags: list[str], project: Path) -> None:
    made = call(["prepare", "countdown", "--difficulty", "1", "--limit", "40"])
    assert made.code == 0, made.output
    assert "every reference answer scores 1.0 under the reward countdown" in made.output
    train, _ = read_prompts(project / "data" / "countdown" / "train.parquet")
    assert ({p.difficulty for p in train}, len(train)) == ({1}, 40)
    reply = call([*DRY_RUN, "--data", "data/countdown", *flags])
    assert reply.code == 0, reply.output
    assert "40 training problems, reward countdown" in reply.output
    assert "ready: " in reply.output


def test_the_flags_of_train_are_settings(project: Path) -> None:
    flags = ["--chat-template", "thinking.jinja", "--template-arg", "enable_thinking=false"]
    reply = call([*DRY_RUN, *flags])
    assert reply.code == 0, reply.output
    data = printed_json(reply)["data"]
    assert data["chat_template"] == "thinking.jinja"
    assert data["template_args"] == {"enable_thinking": False}
    refused = call([*DRY_RUN, "--template-arg", "enable_thinking=false"])
    assert refused.code == 2
    assert "does not use" in refused.output
    (project / "bad.jinja").write_text("{% for %}")
    refused = call([*DRY_RUN, "--chat-template", "bad.jinja"])
    assert refused.code == 2
    assert "TemplateSyntaxError" in refused.output


def test_serve_renders_as_in_training() -> None:
    template = ChatTemplate(text=THINKING, args={"enable_thinking": False})
    argv = VllmLauncher().command(replace(PUBLIC, template=template))
    assert f"--chat-template={THINKING}" in argv
    assert '--default-chat-template-kwargs={"enable_thinking": false}' in argv
    default = VllmLauncher().command(replace(PUBLIC, template=ChatTemplate()))
    assert not [word for word in default if "chat-template" in word]


NOW = datetime(2001, 2, 3, 16, 5, 6)
CLOCKS = {
    "variable": "\n  {% if strftime_now is defined %}{% set d = strftime_now('%d %b') %}{% endif %}{{ d }}",
    "in a macro": "{%- macro head() %}{{- 'At ' + strftime_now(\"%Y-%m-%d\") }}{%- endmacro %}{{ head() }}",
    "directives": "{{ strftime_now('%a %A %w %B %m %y %H:%M:%S %I %p %j %U %W %G-%V-%u %F %T') }}",
    "without zeros": "{{ strftime_now('%-d/%-m, %e') }} {{ strftime_now(format='%H') | int + 1 }}",
    "percent": "{{ strftime_now('100 %% of %Y, %%d') }}",
    "chosen": "{% set f = '%d' if messages|length == 2 else '%m' %}{{ strftime_now(f) }}",
}


@pytest.mark.parametrize("form", CLOCKS)
def test_other_programs_write_the_time_of_the_run(form: str, tmp_path: Path, tiny_llama: Path) -> None:
    """vLLM and exports get the template as text. transformers then renders what the run's sandbox does."""
    text = f"{CLOCKS[form]}\n{THINKING}"
    template = ChatTemplate(text=text, now=NOW)
    with contextlib.closing(load_tokenizer(tiny_llama, template)) as tokenizer:
        ids = tokenizer.encode_chats([CHAT])[0]
    plain = AutoTokenizer.from_pretrained(tiny_llama)
    handed = text_for_others(template, tiny_llama)
    used = {"tokenize": False, "add_generation_prompt": True}
    shown = plain.apply_chat_template(CHAT, chat_template=handed, **used)
    assert plain.encode(shown, add_special_tokens=False) == ids
    assert shown != plain.apply_chat_template(CHAT, chat_template=text, **used)

    own = shutil.copytree(tiny_llama, tmp_path / "dated")
    (own / "chat_template.jinja").write_text(text)
    served = VllmLauncher().command(replace(PUBLIC, model_path=own, template=ChatTemplate(now=NOW)))
    assert f"--chat-template={handed}" in served
    write_template(ChatTemplate(now=NOW, args={"enable_thinking": True}), own)
    exported = AutoTokenizer.from_pretrained(own)
    assert exported.apply_chat_template(CHAT, **used) == shown


def test_only_a_template_that_writes_the_time_is_handed_out(tiny_llama: Path) -> None:
    assert text_for_others(ChatTemplate(now=NOW), tiny_llama) is None
    assert text_for_others(ChatTemplate(text=THINKING, now=NOW), tiny_llama) == THINKING


def test_serve_refuses_a_dated_template_that_no_command_line_holds(tmp_path: Path, tiny_llama: Path) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "long")
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d') }}" + "x" * (128 << 10))
    with pytest.raises(ModelError, match="131,"):
        VllmLauncher().command(replace(PUBLIC, model_path=model, template=ChatTemplate(now=NOW)))


def test_serve_never_takes_a_template_for_a_path(tmp_path: Path) -> None:
    path = tmp_path / "{secret}"
    path.write_text("x")
    for text in (str(path), "/etc/passwd"):
        with pytest.raises(ModelError, match="is a path, not a template"):
            VllmLauncher().command(replace(PUBLIC, template=ChatTemplate(text=text)))


def test_an_evaluation_uses_the_template_of_the_run(tmp_path: Path) -> None:
    recorded = load_config(None, {}, ["data.chat_template=gone.jinja", "data.template_args.a=1"])
    decided = resolved(Path("m"), Path("a"), model={"chat_template": THINKING})
    run = RunConfig(skylite_version="1", config=recorded, resolved=decided)
    adapter = ServedAdapter(
        adapter=AdapterVersion(1, tmp_path),
        base_model="m",
        rank=1,
        target_modules=None,
        is_on_tower=False,
        run=None,
        run_config=run,
    )
    assert chosen_template(adapter, recorded, NOTHING_TYPED) == ChatTemplate(text=THINKING, args={"a": 1})
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages }}")
    provenance = typed({}, [f"data.chat_template={own}", "data.template_args.a=2"])
    changed = change_config(recorded, provenance)
    assert chosen_template(adapter, changed, provenance) == ChatTemplate(text="{{ messages }}", args={"a": 2})
    assert chosen_template(None, load_config(None, {}), NOTHING_TYPED) == ChatTemplate()

    dated = resolved(Path("m"), Path("a"), model={"template_time": NOW})
    adapter = replace(adapter, run_config=run.model_copy(update={"resolved": dated}))
    assert chosen_template(adapter, recorded, NOTHING_TYPED).now == NOW
    assert chosen_template(adapter, changed, provenance).now == NOW
