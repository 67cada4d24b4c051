"""The process that renders chat templates, with a third of the time limits: tests wait until they are reached."""

from vllm_lite.client.text.templates import template_process
from vllm_lite.runtime.supervise import run_child

template_process.MAX_CPU_S, template_process.MAX_COMPILE_S = 0.3, 1.0

if __name__ == "__main__":
    run_child(template_process.main, template_process.RenderSettings)
