"""`make fuzz`: read damaged files with every reader, and count tracebacks, hangs and touched files.

Tokenizer files get a tenth of a share, because each starts a process. Exit code 1 if anything went wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from shared import argument_parser, machine_info

from tests.fuzz.readers import READERS
from tests.fuzz.run import Fuzzer, make_ground

BATCH = 100
OUTCOMES = ("accepted", "refused", "traceback", "hang", "touched")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--files", type=int, default=10_000, help="in total")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--readers", nargs="*", default=list(READERS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shares = {name: READERS[name].share for name in args.readers}
    counts: dict[str, dict[str, int]] = {}
    evidence: list[str] = []
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="skylite-fuzz-") as folder,
        Fuzzer(make_ground(Path(folder) / "ground")) as fuzzer,
    ):
        for name, share in shares.items():
            left = -(-args.files * share // sum(shares.values()))
            found: Counter[str] = Counter()
            for number in range(0, int(left), BATCH):
                size = min(BATCH, int(left) - number)
                part = fuzzer.fuzz(name, args.seed * 1000 + number // BATCH, size)
                found.update(part["counts"])
                evidence += part["evidence"]
            counts[name] = {key: found[key] for key in OUTCOMES}
            print(f"{name:<16} " + "  ".join(f"{k} {v}" for k, v in counts[name].items()), flush=True)
    total = {key: sum(c[key] for c in counts.values()) for key in OUTCOMES}
    print(f"{sum(total.values())} files: " + ", ".join(f"{total[key]} {key}" for key in total))
    print("\n".join(evidence[:20]))
    if args.out is not None:
        seconds = round(time.monotonic() - started)
        result = {**machine_info(), "seconds": seconds, "total": total, "readers": counts}
        args.out.write_text(json.dumps(result | {"evidence": evidence[:20]}, indent=1) + "\n")
    sys.exit(any(total[key] for key in OUTCOMES[2:]))


if __name__ == "__main__":
    main()
