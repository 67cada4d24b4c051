"""SelfDrafter: drafts with a copy of the model whose weights have 4 bits.

The copy reads the K and V of all tokens that the model has computed, so it need not compute the prompt. It writes K and
V of drafts to the slots of their positions; the step that verifies them overwrites these in any case. It copies states
of recurrent layers to scratch slots, so that the model's states include only tokens that the model has drawn. Of a
large vocabulary it drafts only the frequent words, as long as nearly all tokens are frequent: frequent.py.
"""

from collections.abc import Sequence

import torch

from vllm_lite.kernels.cpu import num_threads
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.four_bit_copy import CopyFiles, check_copy, load_copy
from vllm_lite.models.registry import Sizes
from vllm_lite.models.weight_cache import packed_copy
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.batch.step_inputs import Int32s, StepInputs
from vllm_lite.worker.drafting.chain import Chain
from vllm_lite.worker.drafting.frequent import FrequentWords
from vllm_lite.worker.drafting.place import DraftPlace
from vllm_lite.worker.forward import EagerForward, Forward
from vllm_lite.worker.graphs import DecodeGraphs
from vllm_lite.worker.model_runner import warm_up_step
from vllm_lite.worker.sampling.drafter import NO_TOKENS, DraftBatch, Drafter, KVViews
from vllm_lite.worker.sampling.ranked_sampler import sampler_of
from vllm_lite.worker.step_parts.rules import Rules

WARM_TOKENS = 2
"""Tokens of the warm-up step of the copy: more than in a decode step, if steps may have more."""


class SelfDrafter(Drafter):
    """Drafts with the copy, one pass for each draft."""

    _place: DraftPlace  # by `load`
    _copy: Decoder
    eager: EagerForward  # by `begin`
    chain: Chain  # by `attach`

    def load(self, place: DraftPlace) -> None:
        config, limits = place.config, place.limits
        self._place = place
        check_copy(place.model.spec, config.quantization)
        # A pass has the last token of each sequence and the tokens that its grammar forces after it.
        sizes = Sizes(limits.max_model_len, limits.max_num_tokens, exact_activations=config.exact_activations)
        device = place.device.torch
        with packed_copy(config, place.model.communicator.shard, num_threads) as packed:
            files = CopyFiles(config.model, config.load_format, config.seed, config.tokenizer, packed)
            self._copy = load_copy(place.model, sizes, place.dtype, device, files=files, progress=place.loaded)
        if place.kv_scales:
            self._copy.take_kv_scales(place.kv_scales)

    def run_largest(self, own: KVViews, of_model: KVViews) -> None:  # noqa: ARG002 (it has no layers of its own)
        self._warm_up(self._forward_over(of_model), self._place.limits.max_num_seqs)

    def begin(self, own: KVViews, of_model: KVViews) -> None:  # noqa: ARG002 (as above)
        self.eager = self._forward_over(of_model)
        self._warm_up(self.eager, WARM_TOKENS)

    def attach(self, rows: Rows, rules: Rules) -> None:
        place, forward = self._place, self._graphs()
        sampler = sampler_of(self._copy, place.device.torch, place.limits.patience_s)
        self.chain = Chain(forward, sampler, rows, rules, scratch=place.scratch)
        self.chain.words = FrequentWords.of(self._copy.lm_head, forward)

    def rehearse(self, step: StepInputs) -> None:
        self.chain.rehearse(step)

    def before(self, batch: DraftBatch) -> Sequence[Int32s]:
        """See Drafter.before. With recurrent layers, only as many sequences draft as there are scratch slots."""
        most = len(self._place.scratch)
        if batch.states is None or len(batch.handles) <= most:
            return self.chain.draft(batch)
        return [*self.chain.draft(batch.some(range(most))), *[NO_TOKENS] * (len(batch.handles) - most)]

    def _forward_over(self, kv_caches: KVViews) -> EagerForward:
        place = self._place
        return EagerForward(self._copy, list(kv_caches), place.backend, place.device.torch, place.progress)

    def _warm_up(self, forward: Forward, num_tokens: int) -> None:
        limits, device = self._place.limits, self._place.device.torch
        warm_up_step(forward, sampler_of(self._copy, device), limits, min(num_tokens, limits.max_num_tokens))

    @torch.inference_mode()
    def _graphs(self) -> Forward:
        """Recorded steps, if they are recorded on demand (on a CPU); a GPU would need memory for each."""
        capture, limits = self._place.device.capture, self._place.limits
        if capture is None or not self._place.graph_sizes or not capture.on_demand:
            return self.eager
        sizes = {"max_model_len": limits.max_model_len, "block_size": limits.block_size}
        return DecodeGraphs(self.eager, capture, self._place.pass_sizes, **sizes)
