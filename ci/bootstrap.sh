#!/usr/bin/env bash
# Sets up .venv. Run again, it checks in a second that nothing has changed and does nothing.
#
#   ci/bootstrap.sh cpu        a machine without a GPU: the main job and the tests
#   ci/bootstrap.sh gpu        a GPU node (needs access to GitHub; see the section below)
#   ci/bootstrap.sh lock-cpu   resolve ci/requirements-*.txt anew from pyproject.toml
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV_VERSION=0.13.9
VENV=.venv
NEEDED_GIB=9
# SkyRL's own pins for the Megatron stack ([tool.uv.sources] in its repository's pyproject.toml).
MEGATRON_BRIDGE_REVISION=8e7077c6826d17eb4d4d54e6eb15c5a581eda4c0
MEGATRON_LM_REVISION=d476c21be396dc666d2e04fa8c199c3851a1551f
TRANSFORMER_ENGINE_VERSION=2.16.0

say() { printf '[set-up] %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

is_python_312() { "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in "$(command -v uv >/dev/null 2>&1 && uv python find --no-python-downloads 3.12 2>/dev/null || true)" \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python python3.12 python3; do
    if [ -n "$candidate" ] && is_python_312 "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.12 with venv was found through uv, pyenv or PATH: install it (uv python install 3.12, or pyenv install 3.12)"
}

make_venv() {
  if ! is_python_312 "$VENV/bin/python"; then
    local python free
    python=$(find_python)
    free=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1024 / 1024))
    [ "$free" -ge "$NEEDED_GIB" ] || die "$PWD has $free GiB free and the environment needs $NEEDED_GIB GiB: free some"
    say "making $VENV with $("$python" -V) ($python)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
  fi
  UV="$VENV/bin/uv"
  if [ "$("$UV" --version 2>/dev/null | cut -d' ' -f2)" != "$UV_VERSION" ]; then
    say "installing uv $UV_VERSION"
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check "uv==$UV_VERSION"
  fi
}

install() { "$UV" pip install -p "$VENV" --no-deps "$@"; }

# The state that the environment was made from: a change of any of these files sets it up again.
fingerprint() { cat ci/bootstrap.sh ci/requirements-*.txt pyproject.toml | sha256sum | cut -c1-16; }

cpu() {
  make_venv
  local torch=$(grep '^torch==' ci/requirements-cpu.txt)
  # PyTorch's CPU-only build lies on an index of its own, which not every network reaches.
  if UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=5 timeout 8 "$UV" pip install -q -p "$VENV" --dry-run --no-deps --reinstall-package torch \
    --torch-backend cpu "$torch" 2>/dev/null; then
    say "installing with PyTorch's CPU-only build (about 2 GiB on disk)"
    install --torch-backend cpu -r ci/requirements-cpu.txt
  else
    say "PyTorch's CPU-only index is out of reach: installing the ordinary build (about 6 GiB on disk)"
    install -r ci/requirements-cpu.txt -r ci/requirements-cuda-runtime.txt
  fi
  install -e .
}

# Not run by CI. SkyRL's `megatron` extra does not resolve from the package index: it leaves Megatron-Bridge open, whose
# latest release lacks two names that SkyRL imports, and asks for a Transformer Engine wheel with a local version. So
# the gpu extra holds what the index has, and the rest comes from its makers.
gpu() {
  make_venv
  say "installing the gpu extra"
  "$UV" pip install -p "$VENV" --override ci/overrides-gpu.txt -e '.[gpu,dev]'
  say "installing SkyRL's revisions of Megatron-Bridge and Megatron-Core"
  install "megatron-bridge @ git+https://github.com/NVIDIA-NeMo/Megatron-Bridge@$MEGATRON_BRIDGE_REVISION" \
    "megatron-core @ git+https://github.com/NVIDIA/Megatron-LM@$MEGATRON_LM_REVISION"
  say "building Transformer Engine $TRANSFORMER_ENGINE_VERSION for this CUDA"
  "$UV" pip install -p "$VENV" --no-build-isolation "transformer-engine[pytorch,core_cu13]==$TRANSFORMER_ENGINE_VERSION"
}

lock_cpu() {
  make_venv
  local all
  all=$("$UV" pip compile -q -p "$VENV" --override ci/overrides-cpu.txt --extra cpu --extra dev --no-header --no-annotate pyproject.toml)
  {
    echo "# Everything that a CPU machine installs, by name and version. Written by: ci/bootstrap.sh lock-cpu"
    grep -vE '^(nvidia-|cuda-|triton)' <<<"$all"
  } >ci/requirements-cpu.txt
  {
    echo "# What PyTorch's ordinary build links against, also where no GPU is; its CPU-only build needs none of it."
    echo "# Written by: ci/bootstrap.sh lock-cpu"
    grep -E '^(nvidia-|cuda-|triton)' <<<"$all"
  } >ci/requirements-cuda-runtime.txt
}

case "${1:-}" in
cpu | gpu)
  stamp="$VENV/.skyrl-qwen38-$1-$(fingerprint)"
  if ! [ -e "$stamp" ] || ! [ -x "$VENV/bin/python" ]; then
    started=$SECONDS
    "$1"
    touch "$stamp"
    say "done in $((SECONDS - started)) s"
  fi
  ;;
lock-cpu) lock_cpu ;;
*)
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
  ;;
esac
