"""Application: the objects behind the routes of one API server, wired together in front of a ready engine.

Two hosts run it: HttpServer under uvicorn (processes/http_server.py), and a deployment of Ray Serve (ray/).
"""

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from starlette.middleware import Middleware
from starlette.types import ASGIApp

from vllm_lite.checkpoint.layer_specs.pooling import task_prompts
from vllm_lite.client.engines.any_session import AnySession
from vllm_lite.client.generation_config import generation_defaults
from vllm_lite.client.media.fetch import Fetcher
from vllm_lite.client.media.prompt_images import PromptImages
from vllm_lite.client.media.sources import MAX_IMAGES, ImageLimits
from vllm_lite.client.pooling import PoolingFactory
from vllm_lite.client.streams.stream import StreamFactory, load_tokenizer
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ModelError
from vllm_lite.protocol.api import Welcome
from vllm_lite.runtime import log
from vllm_lite.server.app import ApiRoutes, build
from vllm_lite.server.calls.dispatcher import Dispatcher
from vllm_lite.server.calls.list_call import Window
from vllm_lite.server.calls.registry import Calls, QueueLimits
from vllm_lite.server.calls.resumable import ResumableCalls
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.decisions.routes import DecisionRoutes
from vllm_lite.server.generation import Generation, ServedModel
from vllm_lite.server.http.body import BodyReader
from vllm_lite.server.live.prefix import PrefixRoutes
from vllm_lite.server.live.routes import LiveRoutes
from vllm_lite.server.live.settings import settings_of
from vllm_lite.server.live_requests import LiveRequests
from vllm_lite.server.llama_server.information import LlamaCppInformation
from vllm_lite.server.llama_server.routes import LlamaCppPromptRoutes
from vllm_lite.server.messages.routes import MessagesRoutes
from vllm_lite.server.metrics import Metrics
from vllm_lite.server.ollama.information import OllamaModel
from vllm_lite.server.ollama.routes import OllamaRoutes
from vllm_lite.server.openai import grammars
from vllm_lite.server.openai.formats import Formats, architectures_of
from vllm_lite.server.openai.prompts import PromptRenderer, TemplateVariables
from vllm_lite.server.openai.rendering import Renderer
from vllm_lite.server.pooling.routes import PoolingRoutes
from vllm_lite.server.pooling.runs import PoolingRuns
from vllm_lite.server.processes.scoreboard import Scoreboard
from vllm_lite.server.request_spans import RequestSpans
from vllm_lite.server.responses.routes import ResponsesRoutes
from vllm_lite.server.responses.runs import Runs
from vllm_lite.server.responses.store import ResponseStore
from vllm_lite.server.resumption import Resumption
from vllm_lite.server.vllm.adapters import AdapterRoutes
from vllm_lite.server.vllm.derender import DerenderRoutes
from vllm_lite.server.vllm.information import Information
from vllm_lite.server.vllm.operations import OperationRoutes
from vllm_lite.server.vllm.routes import VllmRoutes

logger = log.get(__name__)


class EngineLink(NamedTuple):
    """A ready engine and its resolved config. `reason()` returns why it ended; `announce(url)` publishes the server's
    address."""

    session: AnySession
    config: ResolvedConfig
    reason: Callable[[], str]
    announce: Callable[[str], None] = lambda _: None


class ModelFiles:
    """Data that a server loads from the model's folder, while the engine starts."""

    def __init__(self, config: ServeConfig, resolved: ResolvedConfig) -> None:
        """Load the files. Raises ModelError."""
        self.tokenizer = load_tokenizer(config.tokenizer and resolved.tokenizer, resolved.tokenizer)
        template = TemplateSource.load(resolved.tokenizer, config.chat_template)
        self.formats = self._formats(config, resolved, None if template is None else template.texts)
        self.template_text = None if template is None else template.source
        self.template = None if template is None else Path(template.name).name
        self.renderer = None if template is None else Renderer(template)
        self.task_prompts = task_prompts(Path(resolved.model))
        self.images = self._images(config, resolved.model)
        self.defaults = generation_defaults(resolved.model, config.generation_config, config.override_generation_config)

    def card(self) -> dict[str, str | None]:
        """The model's template and formats, as fields of /v1/models."""
        return {"chat_template": self.template, **({} if self.formats is None else self.formats.card())}

    def _formats(self, config: ServeConfig, resolved: ResolvedConfig, template: str | None) -> Formats | None:
        """Choose the model's formats. Raises ConfigError for an unknown one."""
        calls, reasoning = (
            None if name in ("auto", "") else name for name in (config.tool_call_parser, config.reasoning_parser)
        )
        if self.tokenizer is None:
            return None
        formats = Formats.of(
            resolved.tokenizer, self.tokenizer, (calls, reasoning), template, architectures_of(resolved.model)
        )
        importlib.import_module(grammars.COMPILER)  # now, rather than during the first request that needs it
        logger.info("tool calls: %s, reasoning: %s (%s)", formats.calls, formats.reasoning, formats.choice.why)
        return formats

    def _images(self, config: ServeConfig, model: str) -> PromptImages | None:
        """Make the preprocessing of images. A model whose image processor is not supported is served without images."""
        try:
            return PromptImages.load(model, _image_limits(config), config.mm_processor_kwargs)
        except ModelError as error:
            logger.warning("images are not taken: %s", error)
            return None

    def close(self) -> None:
        if self.renderer is not None:
            self.renderer.close()
        if self.images is not None:
            self.images.pool.close()


class Application:
    """The application of one API server: `app` is the ASGI application, `calls` its running calls. Constructed on the
    loop that serves it."""

    def __init__(
        self, config: ServeConfig, keys: Keys, engine: EngineLink, files: ModelFiles, scoreboard: Scoreboard
    ) -> None:
        self._spans = None if config.otlp_traces_endpoint is None else RequestSpans(config.otlp_traces_endpoint)
        self.calls = Calls(
            Dispatcher(engine.session, asyncio.get_running_loop()),
            _limits(config, engine.config, scoreboard.num_servers),
            scoreboard,
            self._spans,
        )
        self._resumable = ResumableCalls(self.calls, config.stream_resume_s)
        self._store = ResponseStore(config.responses_store, config.responses_store_bytes)
        welcome = engine.session.welcome
        self._reader = BodyReader(config, welcome.max_model_len, takes_images=bool(welcome.placeholders))
        self._runs = Runs(self.calls, self._store, config.stream_resume_s, self._reader.release)
        self.app = self._wire(config, keys, engine, files)

    async def watch(self) -> None:
        """Run the periodic checks until cancelled."""
        await asyncio.gather(self.calls.watch(), self._resumable.watch())

    async def end_runs(self) -> None:
        await self._runs.close()

    def close(self) -> None:
        self._store.close()
        if self._spans is not None:
            self._spans.close()

    def _wire(self, config: ServeConfig, keys: Keys, link: EngineLink, files: ModelFiles) -> ASGIApp:
        engine, resolved = link.session.welcome, link.config
        names = config.names or (engine.model,)
        path = None if config.names else config.model
        card = {**files.card(), "tasks": _tasks(engine)}
        model = ServedModel(names, path, engine.max_model_len, files.defaults.params, card, root=config.model)
        model.session = link.session
        factory = StreamFactory(engine, files.tokenizer, most_tokens=files.defaults.max_tokens)
        forces_usage = config.enable_force_include_usage
        live = LiveRequests(
            self.calls, self._resumable, factory, self._reader, files.formats, forces_usage=forces_usage
        )
        told = TemplateVariables(config.default_chat_template_kwargs or {}, config.reasoning_effort_map or {})
        images = files.images if engine.placeholders else None
        fetch = Fetcher(config.allowed_media_domains) if config.allowed_media_domains else None
        prompts = PromptRenderer(files.tokenizer, files.renderer, engine.max_model_len, told, images, fetch)
        generation = Generation(config, model, factory, prompts, live, files.formats)
        window = Window(resolved.max_num_seqs, resolved.max_num_batched_tokens)
        pooling = PoolingRuns(generation, PoolingFactory(engine, files.tokenizer), window, files.task_prompts)
        pool = None if images is None else images.pool
        metrics = Metrics(self.calls, resolved, names[0], str(self.calls.scoreboard.number), pool)
        information = Information(config, files.tokenizer, files.template_text)
        vectors = PoolingRoutes(pooling)
        more = [*Resumption(live, factory).routes(), *VllmRoutes(generation, information, vectors.invoked).routes()]
        more += OperationRoutes(self.calls, live.reader, resolved).routes()
        more += LiveRoutes(self.calls, settings_of(config, resolved, engine.kernels)).routes()
        more += PrefixRoutes(generation).routes()
        more += [*AdapterRoutes(generation).routes(), *DerenderRoutes(generation).routes()]
        shown = files.template_text if config.enable_tokenizer_info_endpoint else None
        ollama = OllamaModel.of(model, resolved.model, prompts, shown)
        more += LlamaCppInformation(generation, resolved.max_num_seqs, shown).routes()
        more += LlamaCppPromptRoutes(generation).routes()
        more += [*MessagesRoutes(generation).routes(), *OllamaRoutes(generation, ollama, pooling).routes()]
        more += ResponsesRoutes(generation, self._runs, self._store).routes()
        more += vectors.routes()
        more += DecisionRoutes(generation, factory, window, is_deterministic=resolved.deterministic).routes()
        app = build(ApiRoutes(generation, config.root), live, more, config, keys, metrics)
        if self._spans is not None:  # innermost: of requests that the guards let pass
            app.user_middleware.append(Middleware(self._spans.following))
        return app


def _image_limits(config: ServeConfig) -> ImageLimits:
    return ImageLimits((config.limit_mm_per_prompt or {}).get("image", MAX_IMAGES), config.max_image_pixels)


def _limits(config: ServeConfig, resolved: ResolvedConfig, num_servers: int) -> QueueLimits:
    """This server's share of the limits on running and waiting requests."""
    tokens = config.max_num_queued_tokens
    return QueueLimits(
        capacity=-(-resolved.max_num_seqs * resolved.data_parallel_size // num_servers),
        max_queued=-(-config.max_num_queued_reqs // num_servers),
        max_queued_of_all=config.max_num_queued_reqs,
        max_queued_tokens=None if tokens is None else -(-tokens // num_servers),
    )


def _tasks(engine: Welcome) -> list[str]:
    """Tasks that the model can do."""
    return [*(["generate"] if engine.pooler.generates else []), *engine.pooler.tasks]
