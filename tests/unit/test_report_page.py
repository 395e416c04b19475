"""The page of `skylite report`, opened in a real headless browser: what it shows, and what it must not do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skylite.cli.main import app
from skylite.cli.report import report
from skylite.report.html import page_html, plain_values, script_json
from skylite.run.files import write_json
from skylite.run.rollout_file import write_rollouts
from skylite.types import Call, Group, Message, Prompt, Trajectory
from tests.browser import CHROMIUM, Page, browser
from tests.made_up_runs import STEPS, write_made_up_run

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt install chromium)")
EVIL = (
    '</script><script>window.hacked = 1</script><img src="http://127.0.0.1:9/x" onerror="window.hacked = 2">'
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a healthy run, of two runs, and of a run whose strings attack the page."""
    folder = tmp_path_factory.mktemp("pages")
    healthy, hacked = (write_made_up_run(folder / "runs", name) for name in ("healthy", "hacked"))
    evil = write_made_up_run(folder / "runs", "no-signal", steps=4)
    evil.root.rename(folder / "runs" / "{{script}} <b>&lt;")
    evil = type(evil)(folder / "runs" / "{{script}} <b>&lt;")
    write_rollouts(evil.rollout_path(4), [evil_group()])
    write_json(evil.machine_path, {EVIL: EVIL, "name": "\u202etxt"})
    made = {"one": [healthy.root], "two": [healthy.root, hacked.root], "evil": [evil.root]}
    for name, runs in made.items():
        out = str(folder / f"{name}.html")
        done = CliRunner().invoke(app, ["report", *map(str, runs), "--out", out])
        assert done.exit_code == 0, done.output
    return {name: folder / f"{name}.html" for name in made}


def evil_group() -> Group:
    sample = Call(
        prompt_token_ids=[1],
        completion_token_ids=[2],
        sampling_logprobs=[-1.0],
        text=EVIL,
        finish_reason="stop",
    )
    prompt = Prompt(id=EVIL, messages=[Message(role="user", content=EVIL)], answer=EVIL, source="")
    return Group(
        prompt=prompt,
        trajectories=(Trajectory(calls=(sample,), reward=1.0, components={EVIL: 1.0, "b": 0.0}),),
    )


def opened(page: Page, path: Path, **look: bool | int) -> Page:
    page.events.clear()
    page.open(path, **look)  # type: ignore[arg-type]
    return page


@needs_browser
def test_the_page_shows_the_run_and_asks_for_nothing(page: Page, pages: dict[str, Path]) -> None:
    shown = opened(page, pages["one"])
    assert shown.run("document.querySelectorAll('#plots canvas').length") >= 15
    text = shown.run("document.body.innerText")
    for part in (
        "healthy",
        "No alarm.",
        "40 of 40",
        "30.0 % (21.9 to 39.6)",
        "65.0 %",
        "sampling 60 %",
        "lora.rank",
    ):
        assert part in text, part
    assert shown.requests() == [pages["one"].as_uri()]
    assert shown.errors() == []


@needs_browser
def test_the_curves_are_drawn_with_the_values_of_the_run(page: Page, pages: dict[str, Path]) -> None:
    shown = opened(page, pages["one"])
    shown.run("document.getElementById('smooth').click()")
    steps, rewards = shown.run("[drawn[0].chart.data[0], drawn[0].chart.data[1]]")
    lines = [
        json.loads(line)
        for line in (pages["one"].parent / "runs/healthy/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, STEPS + 1))
    assert rewards == [line["reward/mean"] for line in lines]
    versions, accuracies = shown.run("drawn[1].chart.data.slice(0, 2)")
    assert (versions, accuracies) == ([0, 10, 20, 30, 40], pytest.approx([30, 39, 48, 56, 65]))
    shown.run("window.pixels = drawn[0].chart.ctx.getImageData(0, 0, 300, 300).data; 0")
    assert shown.run("pixels.filter((v, i) => i % 4 === 3 && v > 0).length") > 200, "the canvas is empty"


@needs_browser
def test_filters_of_the_completions_and_one_prompt_side_by_side(page: Page, pages: dict[str, Path]) -> None:
    shown = opened(page, pages["one"])
    set_field = "(n, v) => { const f = field(n); f.value = v; f.dispatchEvent(new Event('input')); }"
    count = "parseInt(field('count').textContent)"
    shown.run(f"window.set_field = {set_field}; set_field('source', 'training'); set_field('step', '7'); 0")
    assert shown.run(count) == 64
    assert shown.run("document.querySelectorAll('#s-list article').length") == 12
    shown.run("set_field('min', '1'); 0")
    assert 0 < shown.run(count) < 64
    assert shown.run("matching(PAGE_DATA.runs[0]).every((c) => c.reward === 1 && c.step === 7)")
    shown.run("set_field('min', ''); set_field('step', ''); set_field('source', 'held-out'); 0")
    shown.run("set_field('prompt', 'made-up/test/3'); 0")
    shown.run("document.querySelector('#s-list article button').click()")
    heads = shown.run("[...document.querySelectorAll('#s-list .columns h3')].map((h) => h.textContent)")
    assert heads == ["step 0", "step 10", "step 20", "step 30", "step 40"]
    texts = shown.run("[...document.querySelectorAll('#s-list .columns .text')].map((p) => p.textContent)")
    assert [text.split(" says ")[0] for text in texts] == [f"version {v}" for v in (0, 10, 20, 30, 40)]


@needs_browser
def test_short_and_odd_runs_are_readable(page: Page, tmp_path: Path) -> None:
    """One point has an axis around it, a partial reward has neutral badges, and no verdict comes early."""
    runs = {name: write_made_up_run(tmp_path, name, steps=2) for name in ("length", "healthy")}
    for name, run in runs.items():
        report([run.root], out=tmp_path / f"{name}.html", completions=50)
    shown = opened(page, tmp_path / "length.html")
    assert "No alarm." not in shown.run("document.body.innerText")
    assert shown.run("document.querySelectorAll('.chip.good, .chip.bad').length") == 0
    scale = "(({ x, y }) => [x.min, x.max, y.min, y.max])(drawn[1].chart.scales)"
    low, high, bottom, top = shown.run(scale)
    (version,), (score,) = shown.run("drawn[1].chart.data.slice(0, 2)")
    assert low < version < high
    assert bottom < score < top
    assert (score - bottom) / (top - bottom) == pytest.approx(0.5, abs=0.2), "in the middle"
    shown = opened(page, tmp_path / "healthy.html")
    assert shown.run("document.querySelectorAll('.chip.good').length") > 0
    assert shown.run("document.querySelectorAll('.chip.bad').length") > 0
    assert shown.errors() == []


@needs_browser
def test_a_smooth_curve_shows_a_fall_where_it_happened(page: Page, tmp_path: Path) -> None:
    run = write_made_up_run(tmp_path, "instant-collapse")
    report([run.root], out=tmp_path / "fall.html", completions=0)
    shown = opened(page, tmp_path / "fall.html")
    raw, smooth = shown.run("drawn[0].chart.data.slice(1, 3)")
    assert raw[0] > 0.3
    assert smooth[0] > 0.1
    assert max(smooth[2:]) == 0, "nothing lags behind"
    visible = "[...drawn[0].chart.root.querySelectorAll('.u-series:not(.hidden)')].length"
    assert shown.run(visible) == 2, "the step and one entry for the curve"


@needs_browser
def test_several_runs_are_compared(page: Page, pages: dict[str, Path]) -> None:
    shown = opened(page, pages["two"])
    text = shown.run("document.body.innerText")
    assert "Alarm: Held-out accuracy fell from 50.0 % (version 0) to 10.0 % (version 40)" in text
    assert "repeat themselves" in text
    assert "Settings that differ (0)" in text
    assert shown.run("drawn[0].chart.series.map((s) => s.label)") == [
        "step", "healthy", "healthy", "hacked", "hacked",
    ]  # fmt: skip


@needs_browser
def test_strings_of_a_run_are_text_and_nothing_else(page: Page, pages: dict[str, Path]) -> None:
    shown = opened(page, pages["evil"])
    assert shown.run("typeof window.hacked") == "undefined"
    assert shown.run("document.images.length") == 0
    assert shown.run("document.querySelectorAll('script').length") == 2
    assert shown.run("document.title") == "skylite: {{script}} <b>&lt;"
    shown.run("field('source').value = 'training'; field('step').value = '4'; drawSamples()")
    assert EVIL in shown.run("document.getElementById('s-list').textContent")
    assert EVIL in shown.run("document.getElementById('facts').textContent")
    assert "\u202e" not in shown.run("document.documentElement.textContent")
    assert shown.requests() == [pages["evil"].as_uri()]
    assert shown.errors() == []


@needs_browser
def test_the_policy_stops_injected_code_and_requests(page: Page, pages: dict[str, Path]) -> None:
    """If a string became markup one day, the browser would still refuse to run or fetch it."""
    shown = opened(page, pages["one"])
    shown.run("add(document.body, 'script', 'window.hacked = 3'); 0")
    image = "<img src='http://127.0.0.1:9/a' onerror='window.hacked = 4'>"
    shown.run(f'document.body.insertAdjacentHTML("beforeend", "{image}"); 0')
    failed = "fetch('http://127.0.0.1:9/b').then(() => 'sent', () => 'refused')"
    assert shown.run(failed) == "refused"
    assert shown.run("typeof window.hacked") == "undefined"
    assert len([e for e in shown.errors() if "Content Security Policy" in e]) >= 3


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overflows_a_phone(page: Page, pages: dict[str, Path], dark: bool) -> None:
    shown = opened(page, pages["two"], width=390, height=800, dark=dark)
    shown.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    wide = "[...document.querySelectorAll('#facts .scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
    assert shown.run(f"{wide}.length") == 0
    assert shown.run("document.documentElement.scrollWidth") <= 390
    assert shown.run("Math.max(...drawn.map((d) => d.chart.width))") <= 390
    colour = shown.run("getComputedStyle(document.body).backgroundColor")
    assert colour == ("rgb(16, 20, 26)" if dark else "rgb(246, 247, 249)")
    shown.run("document.getElementById('theme').click()")
    assert shown.run("getComputedStyle(document.body).backgroundColor") != colour


def test_embedded_json_cannot_end_its_script() -> None:
    text = script_json({"a": "</script><!--&amp;\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--&amp;\u2028"}


def test_values_become_plain_json() -> None:
    assert plain_values({"a\x1b": [float("nan"), float("inf"), 1.5, "x\ny\u202ez", None, True]}) == {
        "a ": [None, None, 1.5, "x\ny z", None, True]
    }


def test_the_page_holds_no_address_of_the_network() -> None:
    text = page_html({"runs": [], "plots": []})
    assert text.count("http://") == 0
    assert text.count("https://") == 1  # the comment with uPlot's home and licence
    assert text.count("</script>") == 2
