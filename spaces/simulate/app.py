"""A form around `hf-distca simulate`, for a Space on the Hugging Face Hub. It needs no GPU."""

import subprocess
import sys
import tempfile
from pathlib import Path

import gradio as gr

LENGTHS = ["prolong", "wlbllm", "agents", "agents-tree", "one-long", "lognormal:4000,1.5"]
MODELS = ["llama-8b", "llama-34b"]
PROFILES = ["h100", "h200"]
RANKS = [8, 16, 32, 64, 128]
TOKENS = ["8k", "16k", "32k", "64k"]
SECONDS = 300
"""Time after which a simulation is stopped."""


def simulate(
    lengths: str, uploaded: str | None, model: str, profile: str, ranks: int, tokens: str
) -> tuple[str, str | None]:
    """Return what the command prints, and the file of its report.

    Args:
        lengths: a distribution of the package.
        uploaded: file of document lengths, which replaces `lengths`.
        model: name of a shape.
        profile: name of a device.
        ranks: number of GPUs.
        tokens: tokens per GPU.
    """
    report = Path(tempfile.mkdtemp()) / "report.html"
    command = [sys.executable, "-m", "hf_distca.cli.main", "simulate"]
    command += ["--lengths", uploaded or lengths, "--model", model, "--profile", profile]
    command += ["--ranks", str(ranks), "--tokens-per-rank", tokens, "--report", str(report)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"Stopped after {SECONDS} seconds: choose fewer ranks.", None
    if done.returncode:
        return done.stderr, None
    return done.stdout, str(report)


def form() -> gr.Blocks:
    """Return the page."""
    with gr.Blocks(title="Will it pay?") as page:
        gr.Markdown(
            "# Will balanced long-context training pay?\n"
            "hf_distca balances core attention over GPUs. This predicts the time of a training "
            "step for documents like yours, by each strategy."
        )
        with gr.Row():
            lengths = gr.Dropdown(LENGTHS, value=LENGTHS[0], label="Document lengths")
            uploaded = gr.File(
                label="or your own: .json with a list of lengths in tokens",
                file_types=[".json"],
                type="filepath",
            )
        with gr.Row():
            model = gr.Dropdown(MODELS, value=MODELS[0], label="Model")
            profile = gr.Dropdown(PROFILES, value=PROFILES[0], label="GPU")
            ranks = gr.Dropdown(RANKS, value=RANKS[0], label="GPUs")
            tokens = gr.Dropdown(TOKENS, value="32k", label="Tokens per GPU")
        printed = gr.Code(label="Prediction", language=None)
        report = gr.File(label="Report, a page with pictures")
        gr.Button("Simulate", variant="primary").click(
            simulate, [lengths, uploaded, model, profile, ranks, tokens], [printed, report]
        )
    return page


if __name__ == "__main__":
    form().launch()
