"""Natural language inference on MNLI with CoeF-J, the method of the paper.

    accelerate launch recipes/mnli_coefj.py

DistilRoBERTa, cut after 2 of its 6 blocks; 50 clients, 10 % of them per round; evaluated on the matched and the
mismatched validation set. mnli_coefw.py is the same with our own method, at two thirds of the bytes.

--help lists all options. --config options.yaml reads them from a file.
"""

from hf_coefsfl.tasks.run import run

if __name__ == "__main__":
    run("mnli", method="coef_j", description=__doc__)
