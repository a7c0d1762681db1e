"""Fine-tunes a decoder on prompts and completions, or on conversations, with CoeF-W. Only the answers have a loss.

    accelerate launch recipes/causal_lm_coefw.py

SmolLM2-135M, cut after 10 of its 30 blocks; 50 clients, 10 % of them per round. Any decoder and any text will do. If
the data has no prompt column, every token has a loss:

    accelerate launch recipes/causal_lm_coefw.py --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name my_texts.jsonl \\
        --columns completion=text

--help lists all options. --config options.yaml reads them from a file.
"""

from hf_coefsfl.tasks.run import run

if __name__ == "__main__":
    run("causal_lm", method="coef_w", description=__doc__)
