#!/usr/bin/env bash
# Pretrain a small GPT on the Python standard library's sources twice, with its sequences over two ranks and without,
# and compare. From a fresh clone this is all that is needed:
#
#     bash examples/pretrain_documents/run.sh [FLAGS OF pretrain.py AND OF megacp, for both trainings]
#
# See tools/venv.sh for the environment that is made and the variables that change it. MEGACP_RUNS names another
# folder than runs/pretrain_documents for the results, MEGACP_CP another number of ranks than 2.

set -eu -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/venv.sh
megacp_venv megatron

runs=${MEGACP_RUNS:-runs/pretrain_documents}
here=examples/pretrain_documents
size=${MEGACP_CP:-2}
corpus=$runs/stdlib
mkdir -p "$runs"

export PYTHONWARNINGS=ignore   # megatron-core warns that Transformer Engine and Apex are not here
export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS=1       # one core a rank
if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -lt "$size" ]; then
    export CUDA_VISIBLE_DEVICES= # each rank needs a GPU; both trainings run on the CPU then
fi

part() { echo; echo "==== $*"; }

part "The documents: the Python standard library's sources"
if ! [ -f "$corpus.idx" ] || ! [ -f "$corpus.model" ]; then
    "$PYTHON" tools/preprocess_documents.py --stdlib --max-bytes 4000000 \
        --train-tokenizer --vocab-size 2048 --output-prefix "$corpus"
else
    echo "$corpus.bin is there from an earlier run"
fi

# A calm learning rate: at 3e-3 this model trains on the edge, where float32's rounding alone (another attention kernel
# on one rank) takes two runs apart within 20 steps.
train() { # CP FLAGS...: the same training with its sequences over CP ranks
    local cp=$1 out=$runs/cp$1
    shift
    rm -rf "$out"
    mkdir -p "$out"
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$cp" \
        -m megacp $here/pretrain.py \
        --data-path "$corpus" --tokenizer-model "$corpus.model" \
        --num-layers 4 --hidden-size 192 --num-attention-heads 6 --group-query-attention --num-query-groups 2 \
        --disable-bias-linear --seq-length 1024 --micro-batch-size 1 --global-batch-size 2 \
        --train-iters 40 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 4 \
        --reset-position-ids --eod-mask-loss --eval-interval 20 --eval-iters 2 \
        --log-json "$out/log.jsonl" --dump-parameters "$out/parameters" \
        --context-parallel-size "$cp" --megacp-documents eod "$@"
}

part "Training with each sequence over $size ranks: --context-parallel-size $size"
train "$size" "$@"
part "The same on 1 rank: --context-parallel-size 1"
train 1 "$@"
part "The two compared"
"$PYTHON" $here/compare.py "$runs/cp1" "$runs/cp$size" --picture "$runs/losses.png"
