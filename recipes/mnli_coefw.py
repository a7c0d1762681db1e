"""Natural language inference on MNLI with CoeF-W: does the premise entail the hypothesis, contradict it, or neither?

    accelerate launch recipes/mnli_coefw.py

DistilRoBERTa, cut after 2 of its 6 blocks; 50 clients, 10 % of them per round; evaluated on the matched and the
mismatched validation set. Any other corpus of sentence pairs, from the Hub or from disk:

    accelerate launch recipes/mnli_coefw.py --dataset_name stanfordnlp/snli
    accelerate launch recipes/mnli_coefw.py --dataset_name my_pairs/ --columns premise=first hypothesis=second

--help lists all options. --config options.yaml reads them from a file.
"""

from hf_coefsfl.tasks.run import run

if __name__ == "__main__":
    run("mnli", method="coef_w", description=__doc__)
