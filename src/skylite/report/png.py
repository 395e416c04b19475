"""The curves as PNG files, drawn by matplotlib (the extra `plots`)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from skylite.errors import ConfigError
from skylite.optional_packages import install_command
from skylite.processes.import_path import NEUTRAL_FOLDER
from skylite.report.plots import HELD_OUT
from skylite.run.files import atomic_file

COLORS = ("#3b7ddd", "#e07b00", "#2a9d5c", "#c2408f", "#8a6de0", "#b59b00", "#00a2b8", "#d1495b")
STYLES = ("-", "--", ":", "-.")


def require_matplotlib() -> None:
    """Import matplotlib with its own settings. Raises ConfigError if it is not installed.

    At import it reads `matplotlibrc` of the working folder, where a stranger's can start LaTeX.
    """
    os.environ["MPLBACKEND"] = "Agg"
    try:
        with chdir(NEUTRAL_FOLDER):
            import matplotlib
    except ModuleNotFoundError:
        raise ConfigError(
            "--png needs matplotlib, which is not installed.", f"Run `{install_command('plots')}`."
        ) from None
    matplotlib.rcdefaults()


def write_png_files(page: Mapping[str, Any], folder: Path) -> list[Path]:
    """A picture of each plot that has data, named after its title. `page` comes from page_data.py."""
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    written = []
    for plot in page["plots"]:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes: Any = figure.subplots()
        if not sum(_draw(axes, plot, run, k, len(page["runs"])) for k, run in enumerate(page["runs"])):
            continue
        unit = plot["unit"] or ("%" if plot["percent"] else "")
        axes.set_title(f"{plot['title']} ({unit})" if unit else plot["title"])
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        steps = {x for line in axes.get_lines() for x, y in line.get_xydata() if math.isfinite(y)}
        if len(steps) == 1:  # as on the page; matplotlib would draw ticks between whole steps
            axes.set_xlim(min(steps) - 1, min(steps) + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if plot["log"]:
            axes.set_yscale("log")
        if len(axes.get_lines()) > 1:
            axes.legend(fontsize="small")
        path = folder / f"{re.sub(r'[^a-z0-9]+', '-', plot['title'].lower()).strip('-')}.png"
        with atomic_file(path) as temporary:
            figure.savefig(temporary, dpi=130, format="png")
        written.append(path)
    return written


def _draw(axes: Any, plot: Mapping[str, Any], run: Mapping[str, Any], number: int, num_runs: int) -> int:
    """Draw the curves of a run; the number of them."""
    drawn = 0
    factor = (100.0 if plot["percent"] else 1.0) / plot["divisor"]
    for k, key in enumerate(plot["keys"]):
        color = COLORS[(number if num_runs > 1 else k) % len(COLORS)]
        # A dollar sign would begin a formula.
        name = f"{run['label']} {key}".replace("$", r"\$") if num_runs > 1 else key.replace("$", r"\$")
        if key == HELD_OUT:
            x, rows = [h["version"] for h in run["held_out"]], run["held_out"]
            y = [factor * h["mean"] for h in rows]
            if rows and all(h["low"] is not None for h in rows):
                axes.fill_between(
                    x, [factor * h["low"] for h in rows], [factor * h["high"] for h in rows],
                    color=color, alpha=0.15,
                )  # fmt: skip
        else:
            x = run["metrics"]["step"]
            y = [None if v is None else factor * v for v in run["metrics"].get(key, ())]
        if y:
            style = STYLES[(k if num_runs > 1 else 0) % len(STYLES)]
            is_point = sum(v is not None for v in y) == 1  # a line through it has no length
            axes.plot(x, [float("nan") if v is None else v for v in y], color=color, linestyle=style,
                      marker="o" if key == HELD_OUT or is_point else None, label=name)  # fmt: skip
            drawn += 1
    return drawn
