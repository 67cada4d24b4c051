"""Choice of the writer of images by the tower of a model."""

from pathlib import Path
from typing import Any

from vllm_lite.checkpoint.layer_specs.anyres import AnyresSpec
from vllm_lite.checkpoint.layer_specs.gemma_vision import Gemma3VisionSpec, Gemma4VisionSpec, UnifiedVisionSpec
from vllm_lite.checkpoint.layer_specs.pixtral import PixtralVisionSpec
from vllm_lite.checkpoint.layer_specs.qwen_vision import Qwen2VisionSpec, Qwen3VisionSpec
from vllm_lite.checkpoint.layer_specs.vision import SiglipSpec, VisionSpec
from vllm_lite.client.media.gemma_writers import FittedWriter, SquareWriter
from vllm_lite.client.media.writers import GridWriter, ImageWriter, PatchWriter, RowWriter, TileWriter

WRITERS: dict[type[VisionSpec], type[ImageWriter[Any, Any]]] = {
    AnyresSpec: GridWriter,
    Gemma3VisionSpec: SquareWriter,
    Gemma4VisionSpec: FittedWriter,
    PixtralVisionSpec: RowWriter,
    Qwen2VisionSpec: PatchWriter,
    Qwen3VisionSpec: PatchWriter,
    SiglipSpec: TileWriter,
    UnifiedVisionSpec: FittedWriter,
}


def writer_for(vision: VisionSpec, folder: Path, max_pixels: int) -> ImageWriter[Any, Any]:
    """The writer of a model with this tower. Raises ModelError for a processor that does what is not done here."""
    return WRITERS[type(vision)](vision, folder, max_pixels)
