"""Runs onnxruntime-genai: plainly, with prompt lookup (its n-grams) and with a draft. See `job.py`."""

import json
import subprocess
import sys
from pathlib import Path

import job
import onnxruntime_genai as og


def exported(folder: str) -> Path:
    """Writes a model in ONNX beside its folder, unless it is there, and returns the folder with the format."""
    made = Path(f"{folder}-onnx")
    if not (made / "genai_config.json").exists():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
        subprocess.run([*builder, "-i", folder, "-o", made, "-c", made / "cache"], check=True, stdout=sys.stderr)
    return made


def configured(work: dict, with_draft: bool) -> str:
    """Writes a configuration with the models' files, and returns its folder, which is that of the models' folders."""
    folders = {"decoder": exported(work["target"])} | ({"draft": exported(work["draft"])} if with_draft else {})
    config = json.loads((folders["decoder"] / "genai_config.json").read_text())
    for name, folder in folders.items():
        part = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
        part["filename"] = f"{folder.name}/model.onnx"
        part["session_options"]["intra_op_num_threads"] = work["threads"]
        config["model"][name] = part
    if with_draft:
        config["model"]["type"] = "speculative"
    place = folders["decoder"].parent
    (place / "genai_config.json").write_text(json.dumps(config))
    return str(place)


def ways(work: dict) -> dict:
    def load(with_draft=False, **speculation):
        model = og.Model(configured(work, with_draft))

        def generate(prompt, new_tokens):
            params = og.GeneratorParams(model)
            params.set_search_options(do_sample=False, max_length=len(prompt) + new_tokens)
            if speculation:
                params.set_speculative_options(**speculation)
            generator = og.Generator(model, params)
            generator.append_tokens([prompt])
            while not generator.is_done():
                generator.generate_next_token()
            return generator.get_sequence(0)[len(prompt) :]

        return generate

    return {"plain": load} | job.speculating(
        work,
        lambda n: load(ngram_size=3, max_draft_tokens=n),
        lambda n: load(with_draft=True, max_draft_tokens=n),
    )


if __name__ == "__main__":
    job.do(ways)
