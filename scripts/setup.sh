#!/usr/bin/env bash
# Make .venv in this checkout and install purestep into it, editable, with the extras given:
#
#     bash scripts/setup.sh plot dev
#
# PYTHON names the interpreter (3.11 or later; default: the first on the PATH), TORCH the torch to install
# (default: the version the tests are run with). Nothing is done when nothing has changed since the last time.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
torch="${TORCH:-torch==2.13.0}"
extras="$(IFS=,; echo "$*")"

candidates=(python3 python3.14 python3.13 python3.12 python3.11 python)
[[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")

find_python() {
    local candidate
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or later found (tried: ${candidates[*]}); install one, or name it with" \
        "PYTHON=/path/to/python" >&2
    return 1
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # none yet, or one that was interrupted
    python="$(find_python)"
    echo "making .venv with $("$python" --version)" >&2
    "$python" -m venv --clear "$venv"
fi

stamp="$venv/installed-${extras:-base}"
wanted="$(echo "$root $torch" | cat - "$root/pyproject.toml" | cksum)"
if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    echo "installing $torch and purestep[$extras] into .venv: this takes some minutes the first time" >&2
    for other in "$venv"/installed-*; do # what they say was installed may be replaced now
        [[ "$(cat "$other" 2>/dev/null)" == "$wanted" ]] || rm -f "$other"
    done
    "$venv/bin/python" -m pip install --quiet "$torch" --editable "$root${extras:+[$extras]}"
    echo "$wanted" >"$stamp"
fi
