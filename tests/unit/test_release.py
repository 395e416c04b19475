"""The version is the same everywhere, and the repository has the files of a release."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import skylite

ROOT = Path(__file__).parents[2]


def test_the_newest_version_in_the_changelog_is_the_package_version() -> None:
    versions = re.findall(
        r"^## (\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert versions[0] == skylite.__version__


def test_the_citation_names_the_package_version() -> None:
    assert f"\nversion: {skylite.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_quickstart_installs_the_wheel_of_this_version() -> None:
    wheels = re.findall(
        r"skylite_rl-([\w.]+)-py3-none-any\.whl", (ROOT / "docs" / "quickstart.md").read_text()
    )
    assert wheels == [skylite.__version__]


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(skylite.__file__).parent / "py.typed").is_file()


def test_every_pin_is_a_version_and_not_a_path_or_url() -> None:
    lines = (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [p for p in pins if not re.fullmatch(r"[\w.-]+==[\w.+!]+", p)] == []
    assert not {"skylite", "torchvision", "torchaudio", "torchcodec"} & {p.partition("==")[0] for p in pins}


def pins_of(file: str) -> set[str]:
    """Names and versions in a file of constraints, such as `pyyaml==6.0.3`, in one spelling."""
    lines = (ROOT / "constraints" / file).read_text().splitlines()
    found = (line.removesuffix(" \\") for line in lines if "==" in line and not line.startswith("#"))
    return {pin.lower().replace("_", "-").replace(".", "-") for pin in found}


def test_every_pinned_package_has_its_hashes() -> None:
    torch = pins_of("torch.txt")
    assert {p.partition("==")[0] for p in torch} == {"torch"}
    assert pins_of("cpu-hashes.txt") | torch == pins_of("cpu.txt")


HASHED = ("torch.txt", "setup.txt", "cpu-hashes.txt", "peers.txt", "verifiers.txt")


@pytest.mark.parametrize("file", HASHED)
def test_every_line_has_a_hash_and_names_no_host(file: str) -> None:
    text = (ROOT / "constraints" / file).read_text()
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    bare = [
        a for a, b in zip(lines, [*lines[1:], ""], strict=True) if "==" in a and "--hash=sha256:" not in b
    ]
    assert (bare, [line for line in lines if "://" in line]) == ([], [])


def test_ci_takes_actions_by_the_digest_of_a_commit() -> None:
    used = re.findall(r"uses: (\S+)", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []


def test_set_up_installs_nothing_without_a_hash_but_on_gpus() -> None:
    text = (ROOT / "Makefile").read_text()
    recipe = text.partition("\n$(READY):")[2].replace("\\\n", " ")
    free = [line.strip() for line in recipe.splitlines() if "pip install" in line]
    assert [re.sub(r".*--no-deps ", "", line) for line in free] == [
        "--no-build-isolation -e .",
        '$(BIN)/pip install --quiet --no-build-isolation -e ".[gpu,dev]"',
    ]
    assert "INSTALL := $(BIN)/pip install --quiet --no-deps --no-build-isolation --require-hashes\n" in text
    assert set(re.findall(r"-r (\S+)", recipe)) == {
        "$(TOOLS)", "$(TORCH)", "$(HASHES)", "$(PEERS)", "$(VERIFIERS)"
    }  # fmt: skip


def test_the_hash_files_hold_all_that_skylite_and_its_build_name() -> None:
    """Set-up installs nothing else: not even what a package of these requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needed = [*project["project"]["dependencies"], *extras["cpu"], *extras["dev"]]
    names = {re.split(r"[<>=]", spec)[0].lower() for spec in needed}
    assert names - {p.partition("==")[0] for p in pins_of("cpu.txt")} == set()
    built_with = {*project["build-system"]["requires"], "setuptools", "pip"}
    assert built_with - {p.partition("==")[0] for p in pins_of("setup.txt")} == set()
