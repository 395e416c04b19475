"""Read a parquet file within a limit of memory: 24 KB of a stranger's can hold 5 GB."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from skylite.run.files import format_bytes
from skylite.untrusted_files import open_file

MOST_BYTES = 4 << 30
"""What a file may take in memory."""
BATCH_BYTES = 1 << 30
"""What the rows that are read at once may take."""
BATCH_ROWS = 8192


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The columns of a file; None for all. Raises OSError, KeyError, ValueError and ArrowException."""
    # From an open file: by its path pyarrow would turn a parent folder named a=b into a column a.
    with open_file(path) as stream, pq.ParquetFile(stream) as file:
        schema, names = file.schema_arrow, columns
        if names is not None:
            if missing := next((name for name in names if name not in schema.names), None):
                raise KeyError(f"it has no column {missing!r}")
            schema = pa.schema([schema.field(name) for name in names], schema.metadata)
        batches, size = [], 0
        _read_first_rows(file)
        for batch in file.iter_batches(_batch_rows(file.metadata), columns=names, use_threads=False):
            batches.append(batch)
            if (size := size + batch.nbytes) > MOST_BYTES:
                raise _too_large()
        return pa.Table.from_batches(batches, schema)


def read_parquet_schema(path: Path) -> pa.Schema:
    """The columns and the footer of a file. Raises as `read_parquet`."""
    with open_file(path) as stream, pq.ParquetFile(stream) as file:
        return file.schema_arrow


def _read_first_rows(file: pq.ParquetFile) -> None:
    """Read a row of each column of each row group, so that damaged metadata raises.

    In `_batch_rows` it would end the process: pyarrow catches C++ exceptions only while it reads.
    """
    for group in range(file.metadata.num_row_groups):
        for name in file.schema_arrow.names:
            next(file.iter_batches(1, row_groups=[group], columns=[name], use_threads=False), None)


def _batch_rows(metadata: pq.FileMetaData) -> int:
    """Rows to read at once. A value can be as long as its column in the file, and stand in each row."""
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    for group in groups:
        chunks = [group.column(k) for k in range(group.num_columns)]
        least = sum(c.num_values * _WIDTHS.get(c.physical_type, 4) for c in chunks)
        if max(least, sum(c.total_uncompressed_size for c in chunks)) > MOST_BYTES:
            raise _too_large()
    longest = max((_longest_row(group) for group in groups), default=1)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, longest)))


_WIDTHS = {"INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BOOLEAN": 0}


def _longest_row(group: pq.RowGroupMetaData) -> int:
    """Bytes that a row of the group can have."""
    chunks = [group.column(k) for k in range(group.num_columns)]
    texts = sum(int(c.total_uncompressed_size) for c in chunks if c.physical_type not in _WIDTHS)
    rows = max(1, int(group.num_rows))
    return texts + sum(8 * int(c.num_values) // rows for c in chunks)


def _too_large() -> ValueError:
    return ValueError(f"it holds more than {format_bytes(MOST_BYTES)}, which is the most that skylite reads")
