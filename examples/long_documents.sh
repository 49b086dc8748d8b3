#!/usr/bin/env bash
# Rows of 4,096 tokens of whole documents, each over four ranks that bring only the keys they need, and the same on one rank:
#
#     bash examples/long_documents.sh [FLAGS OF pretrain.py AND OF megacp]
#
# --pack-documents reads whole documents and packs them anew; a document longer than a row is cut. Positions start anew with each, so
# --megacp-documents positions keeps them apart. The balanced layout gives ranks equal tokens and equal work, and
# --cp-comm-type exchange moves what the documents need of each other's keys. MEGACP_CP is the number of ranks.

set -eu
export MEGACP_CP=${MEGACP_CP:-4} MEGACP_RUNS=${MEGACP_RUNS:-runs/long_documents}
exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_documents/run.sh" --train-iters 20 --seq-length 4096 \
    --pack-documents --cut-documents --megacp-documents positions --megacp-layout balanced --cp-comm-type exchange "$@"
