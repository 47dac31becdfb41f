"""Table of dedicated attention servers that cannot be started or reached."""

from hf_distca.checks.refusal import Refusal, Rule

ALONE = "or start servers on other hosts with attention_servers='external' and hf-distca serve"


class ServerPool:
    """What is refused in a launch with attention servers, and in a server that joins one."""

    TENSOR_PARALLEL = Rule(
        "attention_servers={0.attention_servers!r} is set with tensor parallelism "
        "(tp_size={0.tp_size})",
        "servers serve one group of ranks, and ranks with different heads form separate groups",
        "set attention_servers=0, or tp_size=1",
        lambda facts: facts.tp_size > 1 and facts.attention_servers != 0,
    )
    NOT_PLANNED = Refusal(
        "{file} sets attention_servers",
        "ranks alone are planned here",
        "leave it out, and predict servers with hf-distca simulate --servers",
        condition="`attention_servers` in the file of `hf-distca plan --config`",
    )
    NO_RANKS = Refusal(
        "attention_servers={servers} of {processes} processes leaves no rank to train",
        "servers compute only what ranks ask of them",
        "start more processes: accelerate launch --num_processes {least} or above",
        condition="`attention_servers` that takes all processes of the launch",
    )
    STARTED = Refusal(
        "torch.distributed or accelerate has started already",
        "attention_servers divides the processes before that",
        "make DistCATrainingArguments first in the script",
        condition="`attention_servers` in arguments that are made late in a script",
    )
    NO_GPU = Refusal(
        "the attention server of rank {rank} would compute on {device}, and its host has {gpus} "
        "GPUs",
        "a server that shares a GPU with a rank adds nothing",
        f"start no more processes on a host than it has GPUs, servers included; {ALONE}",
        condition="more processes on a host than GPUs, with `attention_servers`",
    )
    NO_NIXL = Refusal(
        "attention_servers={{'transport': 'nixl'}} is set",
        "it cannot be used: {why}",
        "set 'auto' or 'tcp', or remove the cause",
        condition="`attention_servers={'transport': 'nixl'}` where NIXL cannot be used",
    )
    NO_INTERFACE = Refusal(
        "NIXL is to bind its port to the address {address}",
        "no network interface of this host has the address",
        "use an address of an interface of this host",
        condition="an address of another host for the transport NIXL",
    )
    NOT_A_TOKEN = Refusal(
        "the token has {characters} characters",
        "a token has {digits} hexadecimal digits",
        "use the token that the training run wrote",
        condition="a token of another form",
    )
    READABLE_TOKEN = Refusal(
        "{path} can be read or written by other users (mode {mode})",
        "whoever knows the token can join the run",
        "restrict it with chmod 600, or make a new token",
        condition="a token file that other users can read",
    )
    NO_TOKEN_FILE = Refusal(
        "the token file {path} is named",
        "it cannot be read: {why}",
        "name the file that the training run wrote",
        condition="a token file that cannot be read",
    )
    ADDRESS = Refusal(
        "{setting} is {given!r}",
        "an address has the form HOST:PORT with a port from {least} to 65535",
        "give such an address",
        condition="an address of another form than HOST:PORT",
    )
