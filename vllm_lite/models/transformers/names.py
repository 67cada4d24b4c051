"""A checkpoint's names for the tensors of a model of transformers, by transformers' own table of renamings."""

import re
from collections.abc import Collection, Iterable
from typing import Any

from vllm_lite.checkpoint.tensors.tensor_names import canonical
from vllm_lite.errors import ModelError


class Names:
    """Parameter of the model -> canonical name of the tensor in the checkpoint."""

    def __init__(self, model: Any, parameters: Collection[str], stored: Iterable[str]) -> None:
        """`stored`: names in the checkpoint. Raises ModelError if a tensor is not merely a renamed one."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        known = dict.fromkeys(parameters, True)
        transforms = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters: list[Any] = [entry for entry in transforms if not isinstance(entry, WeightRenaming)]
        self._prefix = model.base_model_prefix
        self._kind = model.config.model_type
        patterns = model._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001
        self._ignored = [re.compile(pattern) for pattern in patterns]
        self._stored: dict[str, str] = {}
        for name in stored:
            parameter = self._parameter(name, known)
            if parameter is not None:
                self._stored.setdefault(parameter, canonical(name))

    def stored(self, parameter: str) -> str:
        """Name of the parameter's tensor in the checkpoint."""
        return self._stored.get(parameter, canonical(parameter))

    def ignores(self, name: str) -> bool:
        """Whether transformers ignores a tensor of this name."""
        return any(pattern.search(name) for pattern in self._ignored)

    def _parameter(self, name: str, known: dict[str, Any]) -> str | None:
        """The parameter that the tensor `name` is for; None if there is none."""
        from transformers.core_model_loading import rename_source_key

        for attempt in (name, canonical(name)):
            for renamings, converters in ((self._renamings, self._converters), ([], [])):
                renamed, source = rename_source_key(attempt, renamings, converters, self._prefix, known)
                if renamed not in known:
                    continue
                if source is not None:
                    raise ModelError(
                        f"{self._kind}: {name} is one of several tensors that transformers makes {renamed} of; merged "
                        "weights, like those of experts, are not supported"
                    )
                return str(renamed)
        return None
