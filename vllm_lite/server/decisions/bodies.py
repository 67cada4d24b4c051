"""The body of a decision, under the names of vLLM and of TypeSafe's API."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.client.decisions.questions import MAX_QUESTIONS, QuestionFields
from vllm_lite.client.decisions.reads import ReadParams
from vllm_lite.server.openai.bodies import Name, RequestId, Variables


class DecisionBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/systemone. `state` is a text or JSON; `questions` about it have names that the caller chooses;
    `instructions` precede both in the prompt."""

    model: str | None = None
    state: Any
    questions: Annotated[dict[str, QuestionFields], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    instructions: Any = None
    chat_template_kwargs: Variables | None = None
    priority: int | None = None
    user: Name | None = None
    cache_salt: Name | None = None
    deadline_ms: int | None = None
    request_id: RequestId | None = None

    def params(self) -> ReadParams:
        """Parameters of each question's request."""
        return ReadParams(
            priority=self.priority or 0,
            user=self.user or None,
            cache_salt=self.cache_salt,
            deadline_ms=self.deadline_ms,
        )
