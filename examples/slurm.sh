#!/bin/bash
# Trains on the nodes of a Slurm job, with any of the configs; accelerate starts the processes of each node.
#
#   sbatch --nodes 2 examples/slurm.sh examples/configs/fsdp2.yaml examples/finetune_llama.py --model_name_or_path … --bf16
#
# What hf-distca doctor says of the same nodes:
#
#   sbatch --nodes 2 examples/slurm.sh examples/configs/ddp.yaml --module hf_distca.cli.main doctor
#
#SBATCH --job-name=distca
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-gpu=8
#SBATCH --output=distca-%j.log
set -euo pipefail

# An interface that nodes reach one another by: gloo, which carries words between ranks, gives others its address.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-eth0}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

config=$1
shift
read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export CONFIG=$config MAIN_ADDRESS=$first_node MAIN_PORT=$((20000 + SLURM_JOB_ID % 10000))
export PROCESSES=$((SLURM_JOB_NUM_NODES * ${SLURM_GPUS_ON_NODE:-1}))

# Each node is one machine of the launch; its number is known there only.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file "$CONFIG" \
    --num_machines "$SLURM_JOB_NUM_NODES" --machine_rank "$SLURM_NODEID" --num_processes "$PROCESSES" \
    --main_process_ip "$MAIN_ADDRESS" --main_process_port "$MAIN_PORT" "$@"' launch "$@"
