#!/usr/bin/env bash
# Run every check of this repository: lint, format, types, import contracts, tests. What follows on the command
# line goes to pytest: `bash tests/run.sh tests/unit -k ring`. Stops at the first part that fails. Files of tests run side by
# side, up to four; with MEGACP_TREES they run one after the other, so that what was found stands in one table.
# See tools/venv.sh for the environment that is made and the variables that change it.

set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/venv.sh

part() { # NAME COMMAND...: run one part, and leave with a clear line if it fails
    local name=$1 start=$SECONDS status
    shift
    echo
    echo "==== $name"
    "$@"
    status=$?
    if [ $status -ne 0 ]; then
        echo
        echo "==== FAILED: $name (exit status $status). The parts after it were not run."
        exit $status
    fi
    echo "==== passed: $name ($((SECONDS - start)) s)"
}

megacp_venv megatron,test || exit 1

part "lint (ruff check)" "$PYTHON" -m ruff check
part "format (ruff format --check)" "$PYTHON" -m ruff format --check
part "types (mypy)" "$PYTHON" -m mypy
part "import contracts (lint-imports)" "$(dirname "$PYTHON")/lint-imports" --no-logo
workers=auto
[ -z "${MEGACP_TREES:-}" ] || workers=0
part "tests (pytest)" "$PYTHON" -m pytest --numprocesses "$workers" --maxprocesses 4 --dist loadfile "$@"
