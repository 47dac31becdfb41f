"""Train with axolotl and its plugin, and compare the losses: `make axolotl`."""

from same_losses import (
    DPO_BOUND,
    HERE,
    compare,
    compare_with_trainers,
    folder_of,
    free_port,
    make_inputs,
    run,
)

OURS = ("DistCAPlugin", "tokens_per_rank")
"""Words of the lines that only the plugin reads."""

folder = folder_of(__doc__)
make_inputs(folder)


def axolotl(name: str) -> None:
    launcher = ("torchrun", "--", "--nproc_per_node=2", f"--master_port={free_port()}")
    run(folder, name, "axolotl", "train", f"{name}.yaml", "--launcher", *launcher)


(folder / "sft.yaml").write_text((HERE / "axolotl_sft.yaml").read_text())


compare_with_trainers("axolotl, fine-tuning", folder, lambda: axolotl("sft"), bound=1e-5)

text = (HERE / "axolotl_dpo.yaml").read_text()
(folder / "dpo.yaml").write_text(text)
stock = "".join(
    line for line in text.splitlines(keepends=True) if not any(word in line for word in OURS)
)
(folder / "stock-dpo.yaml").write_text(stock.replace("program-dpo", "stock-dpo"))
axolotl("dpo")
axolotl("stock-dpo")
trainings = {"with the plugin": folder / "program-dpo", "axolotl": folder / "stock-dpo"}
compare("axolotl, DPO", trainings, bound=DPO_BOUND)
