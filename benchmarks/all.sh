# The benchmarks of docs/results/speed.md, one after the other: sh all.sh PYTHON, in this directory (`make bench`).
set -eux
tiny="--model ../models/tiny --temperature .02 --prompts 8 --group_size 8 --prompt_length 16 --response_length 32"
$1 throughput.py $tiny --steps 5 --output results/throughput_grpo_tiny.json
$1 throughput.py $tiny --steps 5 --algo dapo --output results/throughput_dapo_tiny.json
$1 throughput.py $tiny --steps 5 --algo ppo --prompts 64 --group_size 1 --output results/throughput_ppo_tiny.json
$1 throughput.py --model ../models/smollm2 --warmup 2 --steps 1 --output results/throughput_grpo_smollm2.json
$1 throughput.py --model ../models/smollm2 --algo sft --prompts 16 --warmup 3 --output results/throughput_sft_smollm2.json
$1 peer.py $tiny --trl_batch 32 --max_length 128 --steps 4 --output results/peer_grpo_tiny.json
$1 peer.py --model ../models/smollm2 --steps 1 --output results/peer_grpo_smollm2.json
$1 peer.py --model ../models/smollm2 --ranks 2 --steps 1 --output results/peer_grpo_smollm2_2ranks.json
$1 peer.py --model ../models/smollm2 --algo sft --prompts 16 --steps 1 --output results/peer_sft_smollm2.json
