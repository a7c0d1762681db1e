"""Extractive question answering on SQuAD v2.0 with CoeF-W: find the span that answers a question, or none.

    accelerate launch recipes/squad_v2_coefw.py

DistilRoBERTa, cut after 2 of its 6 blocks; windows of 384 tokens that share 128; 50 clients, 10 % of them per round.
One client per article instead of equal shares:

    accelerate launch recipes/squad_v2_coefw.py --partition column --partition_column title

--help lists all options. --config options.yaml reads them from a file.
"""

from hf_coefsfl.tasks.run import run

if __name__ == "__main__":
    run("squad_v2", method="coef_w", description=__doc__)
