"""The source for an --input-file."""

from vllm_lite.errors import ConfigError
from vllm_lite.tools.batch.batch_source import BatchSource, check_local, is_parquet
from vllm_lite.tools.batch.hub_dataset import HubDataset
from vllm_lite.tools.batch.jsonl_file import JsonlFile
from vllm_lite.tools.batch.parquet_file import ParquetInput
from vllm_lite.tools.batch.row_mapper import RowMapper

DATASETS = "datasets:"


def open_source(path: str, mapper: RowMapper) -> BatchSource:
    """Choose the source by the name: datasets:ID, *.parquet, or JSON lines. Raises ConfigError."""
    if path.startswith(DATASETS):
        return HubDataset(path.removeprefix(DATASETS), mapper)
    check_local(path, "--input-file")
    if is_parquet(path):
        return ParquetInput(path, mapper)
    if mapper.is_set:
        names = "--endpoint, --prompt-column, --id-column and --body"
        raise ConfigError(f"{names} are for tables (.parquet, {DATASETS}ID); lines of JSON say it all themselves")
    return JsonlFile(path)
