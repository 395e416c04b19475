"""The version is the same everywhere, and the repository has the files of a release."""

from __future__ import annotations

import re
from pathlib import Path

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
    wheels = re.findall(r"skylite-([\w.]+)-py3-none-any\.whl", (ROOT / "docs" / "quickstart.md").read_text())
    assert wheels == [skylite.__version__]


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(skylite.__file__).parent / "py.typed").is_file()


def test_every_pin_is_a_version_and_not_a_path_or_url() -> None:
    lines = (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [p for p in pins if not re.fullmatch(r"[\w.-]+==[\w.+!]+", p)] == []
    assert not {"skylite", "torchvision", "torchaudio", "torchcodec"} & {p.partition("==")[0] for p in pins}


def test_every_pinned_package_but_torch_has_its_hashes() -> None:
    pins = [line for line in (ROOT / "constraints" / "cpu.txt").read_text().splitlines() if "==" in line]
    blocks = (ROOT / "constraints" / "cpu-hashes.txt").read_text().split("\n")
    hashed = {line.removesuffix(" \\").lower().replace("_", "-") for line in blocks if "==" in line}
    expected = {p.lower().replace("_", "-").replace(".", "-") for p in pins if not p.startswith("torch==")}
    assert {h.replace(".", "-") for h in hashed} == expected
    lines = [line for line in blocks if line and not line.startswith("#")]
    bare = [
        a for a, b in zip(lines, [*lines[1:], ""], strict=True) if "==" in a and "--hash=sha256:" not in b
    ]
    assert bare == []
