#!/bin/sh
# Train a model of width 512 for a few hundred steps, then quantise its experts by rounding and with error feedback:
#   benchmarks/gptq_gain.sh OUTPUT_FOLDER [K3TRAIN_COMMAND]
set -eu
out=$1
k3train=${2:-k3train}
steps=${STEPS:-300}
$k3train train run.dir="$out" run.name=gptq model=k3_tiny model.hidden_size=512 model.dense_hidden=1024 \
    "model.pattern=KKKF F" model.kda.heads=8 model.kda.head_dim=64 model.mla.heads=8 model.mla.kv_lora_rank=64 \
    model.moe.latent=256 model.moe.expert_hidden=256 train.seq_length=512 train.micro_batch=16 train.global_batch=32 \
    train.steps="$steps" train.eval_every="$steps" checkpoint.every="$steps" optim.lr=1e-3 tracking.wandb=disabled
$k3train export run.dir="$out" run.name=gptq
$k3train quantize run.dir="$out" run.name=gptq quantize.output="$out/rtn"
$k3train quantize run.dir="$out" run.name=gptq quantize=gptq quantize.output="$out/feedback"
