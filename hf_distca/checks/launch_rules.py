"""Rules of processes, of a launch, and of a trainer with model and accelerator."""

from hf_distca.checks.refusal import Refusal, Rule
from hf_distca.checks.server_rules import ServerPool
from hf_distca.checks.setting_names import CHECKPOINTING

PROCESSES: tuple[Rule, ...] = (
    Rule(
        "a process that reads data makes the arguments of training",
        "it only imports the script, and would train, too",
        "put the script's code under `if __name__ == '__main__':`, or leave "
        "dataloader_num_workers at 0",
        lambda facts: facts.imports_script,
        condition=(
            "`dataloader_num_workers` with spawn or forkserver in a script without `if __name__ "
            "== '__main__':`"
        ),
    ),
    Rule(
        "DeepSpeed is configured with use_cpu or ACCELERATE_USE_CPU",
        "accelerate would then train without DeepSpeed",
        "leave use_cpu out: processes that see no GPU (CUDA_VISIBLE_DEVICES=) train on the CPU "
        "without it",
        lambda facts: facts.processes > 1 and facts.asks_for_deepspeed and facts.use_cpu,
    ),
    Rule(
        "deepspeed={0.deepspeed!r:.60} configures DeepSpeed for processes without GPUs",
        "transformers then names no backend to accelerate, so that each process would train alone",
        "leave deepspeed out of the arguments, and use accelerate launch --config_file "
        "examples/configs/zero2.yaml, zero3.yaml or your own, which may name a "
        "deepspeed_config_file",
        lambda facts: facts.processes > 1 and facts.deepspeed and not facts.has_gpu,
        condition="`deepspeed` in the arguments of several processes without GPUs",
    ),
)
"""Processes that cannot train with the arguments that they make."""
NOT_CONNECTED = Rule(
    "the launcher started {0.launched} processes, torch.distributed connects {0.in_torch} and "
    "accelerate {0.by_accelerate}",
    "processes that are not connected would each train alone, on the same documents",
    "without GPUs set ACCELERATE_USE_CPU=true, or use_cpu=True (--use_cpu) in a trainer's "
    "arguments; else launch with accelerate launch or torchrun; where each process is to train "
    "alone, set WORLD_SIZE=1",
    lambda counts: counts.differ,
    condition="the launcher, torch.distributed and accelerate count different processes",
)
SHARED_GPU = Refusal(
    "several ranks share a GPU: {shared}",
    "NCCL takes one rank per GPU",
    "start one process per GPU, each with its own torch.cuda.set_device(LOCAL_RANK); or use gloo, "
    "with ddp_backend='gloo' or init_process_group('gloo')",
    condition="several ranks on one GPU",
)

PLACED = "plans already divide a document of up to ranks * tokens_per_rank tokens among ranks"
NO_GRADIENT = (
    "{0.towers} of {0.model} get no gradient from batches of text, so DDP would leave ranks with "
    "different weights"
)
TRAINER: tuple[Rule, ...] = (
    Rule(
        "context parallelism (cp_size={0.cp_size}) divides documents among ranks",
        PLACED,
        "set cp_size=1, and raise dp_shard_size to shard the weights over the same ranks",
        lambda facts: facts.cp_size > 1,
    ),
    Rule(
        "sequence parallelism (sp_size={0.sp_size}) divides documents among ranks",
        PLACED,
        "set sp_size=1, and use ZeRO-3 to shard the weights over the same ranks",
        lambda facts: facts.sp_size > 1,
    ),
    Rule(
        "{0.trainer} gets a data set with images",
        "rollouts with images are not tested",
        "train on text, or use TRL's own trainer with attn_implementation='sdpa'",
        lambda facts: facts.rolls_out_images,
        condition="images for DistCAGRPOTrainer and DistCARLOOTrainer",
    ),
    Rule(
        "{0.trainer} gets a data set with images for {0.model}",
        "the images of this model cannot be divided among ranks: {0.why_no_images}",
        "train on text, use TRL's own trainer with attn_implementation='sdpa', or take a "
        "model that the page Model compatibility lists with images",
        lambda facts: facts.has_images and facts.why_no_images,
        condition="images for a model that Model compatibility does not list with images",
    ),
    Rule(
        "{0.trainer} runs with tensor parallelism (tp_size={0.tp_size})",
        "padded batches and TRL's losses are not tested with it, where each rank has a shard of "
        "the output head",
        "set tp_size=1, and share the weights with FSDP2 or ZeRO-3; or train with DistCATrainer on "
        "input_ids and labels",
        lambda facts: facts.tp_size > 1 and (facts.is_of_trl or not facts.packs),
        condition="tensor parallelism with TRL's trainers or padded batches",
    ),
    Rule(
        "torch.compile is set for the whole model (torch_compile, --dynamo_backend)",
        "it cannot compile planned attention and decoder layers under ping-pong, which are most of "
        "the model",
        "leave torch_compile=False and accelerate's --dynamo_backend at no; to compile modules "
        "inside the layers: for layer in model.model.layers: layer.mlp.compile()",
        lambda facts: facts.compiles,
    ),
    Rule(
        "FSDP's activation_checkpointing_offload is set",
        "every layer would wait for its copies",
        "set offload_activations=True instead, which copies while layers compute",
        lambda facts: facts.fsdp_offloads,
    ),
    Rule(
        "tensor parallelism of size {0.tp_size} is set without DistributedConfig",
        "the model was not divided when it was loaded, or DeepSpeed divided it, which is not "
        "supported",
        'load the model with from_pretrained(name, attn_implementation="distca",'
        " distributed_config=transformers.distributed.DistributedConfig(tp_size=…, fsdp_size=…)), "
        "and launch without --use_fsdp and --use_deepspeed",
        lambda facts: facts.tp_size > 1 and not facts.is_divided,
    ),
    Rule(
        "pipeline parallelism (pp_size={0.pp_size}) gives ranks different layers",
        "ranks exchange core attention within the same layer",
        "set pp_size=1, and raise fsdp_size to use the same ranks",
        lambda facts: facts.pp_size > 1,
    ),
    Rule(
        "adapters of PEFT train with tp_size={0.tp_size} and dp_replicate_size={0.replicas}",
        "PEFT does not divide its adapters as the model's layers are divided",
        "set both to 1, and raise fsdp_size to use the same ranks",
        lambda facts: (
            facts.is_divided and facts.is_adapted and max(facts.tp_size, facts.replicas) > 1
        ),
    ),
    ServerPool.TENSOR_PARALLEL,
    Rule(
        "gradient_accumulation_steps={0.accumulation} is set for "
        "{0.model} with tensor parallelism (tp_size={0.tp_size})",
        "transformers sums gradients of norms of Q and K over ranks after each micro-batch, and "
        "earlier sums again",
        "set gradient_accumulation_steps=1 and raise tokens_per_rank; where memory is short, use "
        f"mlp_chunk_rows and {CHECKPOINTING}",
        lambda facts: min(facts.tp_size, facts.accumulation) > 1 and facts.sums_gradients,
    ),
    Rule(
        "fp16 mixed precision is set on the CPU",
        "it needs loss scaling, which accelerate does on GPUs only",
        "set bf16=True, or leave out fp16 and bf16",
        lambda facts: facts.is_fp16_on_cpu,
    ),
    Rule(
        "modules_to_save={0.tied} has a copy of tied embeddings under FSDP2",
        "accelerate ties the weights again when it divides the model, and the other one would use "
        "the trained copy",
        "train under DDP or ZeRO",
        lambda facts: facts.tied,
    ),
    Rule(
        "trainable_token_indices is set for tied embeddings under FSDP2",
        "the head would add trained tokens to a weight of which each rank has a shard",
        "train under DDP or ZeRO",
        lambda facts: facts.tied_tokens,
    ),
    Rule(
        "ensure_weight_tying=True lets {0.views} share memory with other trained weights",
        "DDP trains them as separate weights, with other results; FSDP2 and DeepSpeed fail",
        "leave ensure_weight_tying=False, or leave embed_tokens out of target_modules",
        lambda facts: facts.views,
    ),
    Rule(
        "optimizers=… is given under DeepSpeed",
        "transformers silently ignores it and makes its own from the arguments optim and "
        "lr_scheduler_type",
        "set optimizer_cls_and_kwargs, or override create_optimizer and create_scheduler",
        lambda facts: facts.deepspeed_ignores_optimizer,
    ),
    Rule(
        f"{CHECKPOINTING}_kwargs={{{{'use_reentrant': True}}}} is set",
        NO_GRADIENT,
        "freeze them (requires_grad_(False)), or set 'use_reentrant' to False",
        lambda facts: facts.reentrant and facts.towers,
    ),
    Rule(
        "{0.reads_earlier_keys} reads the keys and values of an earlier layer",
        "a reentrant checkpoint passes no gradient back to them",
        f"set {CHECKPOINTING}_kwargs={{{{'use_reentrant': False}}}}",
        lambda facts: facts.reentrant and facts.reads_earlier_keys is not None,
        condition=(
            "reentrant activation checkpoints of layers that share keys and values (Gemma 3n, "
            "Gemma 4)"
        ),
    ),
    Rule(
        "ddp_find_unused_parameters=False is set",
        NO_GRADIENT,
        "freeze them (requires_grad_(False)), or leave ddp_find_unused_parameters unset",
        lambda facts: facts.ddp_finds_unused is False and facts.towers,
    ),
)
"""Trainers that cannot train exactly as launched."""
