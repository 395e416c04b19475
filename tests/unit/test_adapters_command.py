"""`skylite adapters`: verify names damaged adapters, list shows all, gc deletes what no rule keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skylite.adapters.manifest import Canary, Manifest
from skylite.cli.adapters import gc, list_versions, verify
from skylite.errors import ConfigError
from skylite.run.checkpoint_folder import checkpoint_steps
from skylite.run.files import sha256_file
from skylite.run.own_folders import lock_folder
from skylite.run.run_dir import RunDir, adapter_name, published_versions
from tests.small_run import make_run, settings


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run after step 6 with every adapter version and checkpoints of steps 2, 4 and 6."""
    sections = {"sync": {"keep_last": 2, "keep_every": 4}, "checkpoint": {"every": 2, "keep_last": 1}}
    run = make_run(tmp_path / "run", tmp_path, settings(**sections), {})
    for version in range(7):
        folder = run.default_adapters / adapter_name(version)
        folder.mkdir()
        weights = folder / "adapter_model.safetensors"
        weights.write_bytes(b"weights %d" % version)
        manifest = Manifest(
            version=version,
            step=version,
            parent=None,
            weights_sha256=sha256_file(weights),
            weights_bytes=9,
            base_model="b",
            base_fingerprint="f",
            rank=4,
            alpha=8.0,
            dtype="float32",
            target_modules=["q_proj"],
            canary=Canary(sequences=[[1, 2]], policy_logprobs=[[-1.0]], base_logprobs=[[-1.0]]),
        )
        (folder / "manifest.json").write_text(manifest.model_dump_json())
    for step in (2, 4, 6):
        run.checkpoint_path(step).mkdir()
    (run.default_adapters / ".policy-v000007.tmp-77").mkdir()
    (run.root / ".status.json.tmp-77").touch()
    steps = [{"step": s, "canary/gap_max": 1e-5 * s, "canary/verified": float(s > 2)} for s in range(1, 7)]
    run.metrics_path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return run


def test_verify_prints_damaged_adapters_and_exits_1(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    verify(run.root)
    intact, small = capsys.readouterr().out.splitlines()
    assert intact == "7 of 7 published adapters are intact"
    assert small.startswith("too small to tell: 1, 2 (")
    (run.default_adapters / "policy-v000003" / "adapter_model.safetensors").write_bytes(b"weights X")
    (run.default_adapters / "policy-v000005" / "manifest.json").unlink()
    (run.default_adapters / "policy-v000001").rename(run.default_adapters / "policy-v000009")
    with pytest.raises(SystemExit) as ended:
        verify(run.root)
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert ["policy-v000003/adapter_model" in lines[0], "policy-v000005" in lines[1]] == [True, True]
    assert "policy-v000009 names version 1" in lines[2]
    assert lines[3] == "4 of 7 published adapters are intact"


def test_list_shows_every_version(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run.default_adapters / "policy-v000005" / "manifest.json").write_text("{")
    list_versions(run.root)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["version", "step", "bytes", "age", "canary", "gap"]
    assert [line.split()[0] for line in lines] == [adapter_name(v) for v in range(7)]
    assert lines[0].split()[1:3] + lines[0].split()[-1:] == ["0", "9", "-"]
    assert lines[2].split()[4:] == ["s", "2.0e-05", "too", "small", "to", "tell"]
    assert lines[3].split()[-2:] == ["3.0e-05", "verified"]
    assert "damaged" in lines[5]


def test_gc_deletes_what_the_keep_rules_do_not_need(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    gc(run.root)
    assert [a.version for a in published_versions(run.default_adapters)] == [0, 4, 5, 6]
    assert checkpoint_steps(run) == [6]
    assert not list(run.root.rglob(".*tmp*"))
    output = capsys.readouterr().out
    for part in (
        "policy-v000007.tmp-77",
        "checkpoint step-000002",
        "adapter v1 ",
        "adapter v3 ",
        "3 adapters, 2 checkpoints",
    ):
        assert part in output
    assert "v4" not in output


def test_gc_prints_json(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    gc(run.root, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["adapters"], len(found["checkpoints"])) == ([1, 2, 3], 2)
    assert [Path(path).name for path in found["unfinished"]] == [
        ".status.json.tmp-77",
        ".policy-v000007.tmp-77",
    ]
    assert found["num_bytes"] > 0


def test_gc_refuses_a_live_run(run: RunDir) -> None:
    with lock_folder(run.root), pytest.raises(ConfigError, match="another live run"):
        gc(run.root)
    assert len(published_versions(run.default_adapters)) == 7


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for command in (verify, list_versions, gc):
        with pytest.raises(ConfigError, match="not a skylite run"):
            command(tmp_path)
