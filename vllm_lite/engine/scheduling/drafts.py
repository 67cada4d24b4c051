"""Drafts: what a step has left goes to sequences that draft tokens behind the one they get.

Like all that may be wrong they count as computed until the step's result takes back those that are.
"""

from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.scheduling.queues import Options
from vllm_lite.engine.scheduling.step_plan import StepPlan, joined
from vllm_lite.engine.sequence import Status
from vllm_lite.protocol.step import Continue, Draft


def add_drafts(plan: StepPlan, kv: KVCacheManager, options: Options) -> None:
    """Let decoding sequences draft with the tokens that are left. No sequence is preempted for drafts."""
    most = options.num_drafts or options.num_forced
    share = min(most, plan.budget // len(plan.draftable))
    for place, sequence in plan.draftable:
        end = sequence.num_tokens + sequence.num_pending  # with the token that this step samples
        count = kv.most_drafts(sequence, min(share, sequence.max_len - end))
        if count <= 0 or sequence.status is not Status.RUNNING:
            continue
        entry = plan.entries[place]
        new_ids = entry.new_block_ids if isinstance(entry, Continue) else []
        if end - 1 + count > sequence.num_slots:
            sequence.num_computed -= 1  # the step still reads what its one token needs
            growth = kv.grow(sequence, end - 1 + count)
            sequence.num_computed += 1
            if growth is None:
                continue
            new_ids = joined(new_ids, growth.new_ids)
            plan.entries += growth.entries
        plan.entries[place] = Draft(sequence.handle, count, new_ids)
        plan.drafted.append((sequence, count))
        sequence.drafts(count)
        plan.take(count)
