#!/usr/bin/env bash
# As in fine-tuning on answers: only the last 15 % of each sample count. On two ranks, where one holds nearly all that counts, and on one:
#
#     bash examples/answers_only.sh [FLAGS OF pretrain.py AND OF megacp]
#
# The gradient norms are those of one rank. A mean of each rank's own mean would give others, though the printed losses agree.

set -eu
export MEGACP_RUNS=${MEGACP_RUNS:-runs/answers_only}
exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_documents/run.sh" --answer-only --calculate-per-token-loss "$@"
