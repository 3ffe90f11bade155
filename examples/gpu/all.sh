#!/usr/bin/env bash
# Everything that docs/gpu.md measures, in order of value, each step bounded, its table and its JSON kept:
#     examples/gpu/all.sh OUT [STEP ...]
# Steps: warm tests decode-8b speculate attention pair kernels generate decode-1b decode-70b tune. About 25 minutes in
# all on one GPU; a machine that is lent for less runs some of them at a time. A step that fails or runs out of its time
# does not stop the others: OUT/steps.txt says how each ended.
set -uo pipefail
out=${1:?usage: examples/gpu/all.sh OUT [STEP ...]}
shift
mkdir -p "$out" || exit 2
python=${PYTHON:-python3}
bench="$python -m runtime.bench gpu"
pair=(--target examples/pair/target --draft examples/pair/draft)

# step NAME SECONDS COMMAND ...
step() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    echo "== $name"
    timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    echo "$name: exit $code after $((SECONDS - began)) s" | tee -a "$out/steps.txt"
}

# Compiles what the other steps launch, side by side: Triton keeps it on disk.
warm() {
    local scheme
    for scheme in bf16 int8 int4 nf4 ternary; do
        $bench decode --shape llama-3.1-8b --scheme "$scheme" --widths 1,8,16 --rounds 1 &
    done
    $bench speculate --draft-lengths 4 --rounds 1 --prompts 1 --new-tokens 24 &
    $bench attention --rounds 1 &
    $bench kernels --rounds 1 &
    wait
}

one() {
    case $1 in
    warm) export -f warm; export bench; step warm 120 bash -c warm ;;
    tests)
        # Several workers, since most of a test's time is the compiler's.
        step tests 240 "$python" -m pytest -n auto --maxfail=40 --tb=short tests/runtime/kernels/triton \
            tests/runtime/model/triton tests/runtime/bench/test_measure.py --ignore-glob='*compiles.py'
        ;;
    decode-8b) step decode-8b 180 $bench decode --shape llama-3.1-8b --json "$out/decode-8b.json" ;;
    speculate) step speculate 120 $bench speculate --draft-lengths 2,4,6 --json "$out/speculate.json" ;;
    attention) step attention 90 $bench attention --json "$out/attention.json" ;;
    pair)
        step compress 180 "$python" -m compress.run --recipe nf4 --device cuda --out "$out/run-nf4" --force
        step batch 120 $bench batch "${pair[@]}" --json "$out/batch.json"
        ;;
    kernels) step kernels 180 $bench kernels --json "$out/kernels.json" --choices "$out/choices.json" ;;
    generate) step generate 180 $bench generate --json "$out/generate.json" ;;
    decode-1b) step decode-1b 60 $bench decode --shape tinyllama-1.1b --json "$out/decode-1b.json" ;;
    decode-70b)
        step decode-70b 150 $bench decode --shape llama-3.1-70b --scheme int4 --json "$out/decode-70b.json"
        ;;
    tune) step tune 240 $bench tune --scheme int4 --json "$out/tune-int4.json" ;;
    *)
        echo "unknown step $1" >&2
        exit 2
        ;;
    esac
}

if [ $# -eq 0 ]; then
    set -- warm tests decode-8b speculate attention pair kernels generate decode-1b decode-70b tune
fi
for name in "$@"; do
    one "$name"
done
