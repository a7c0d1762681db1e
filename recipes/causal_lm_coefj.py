"""Fine-tuning of a decoder on prompts and completions with CoeF-J; the loss is on the completions only.

    accelerate launch recipes/causal_lm_coefj.py

SmolLM2-135M, cut after 10 of its 30 blocks; 50 clients, 10 % of them a round. Any decoder and any text; data without a
prompt column has its loss on every token:

    accelerate launch recipes/causal_lm_coefj.py --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name my_texts.jsonl \\
        --columns completion=text

All options: --help. They may also come from a file: accelerate launch recipes/causal_lm_coefj.py options.yaml
"""

from hf_coefsfl.tasks.run import run

if __name__ == "__main__":
    run("causal_lm", method="coef_j", description=__doc__)
