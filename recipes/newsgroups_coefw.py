"""Classification of posts by topic on 20 Newsgroups with CoeF-W.

    accelerate launch recipes/newsgroups_coefw.py

DistilRoBERTa, cut after 2 of its 6 blocks; posts truncated to 256 tokens; 50 clients, 10 % of them per round.
The paper's non-IID split:

    accelerate launch recipes/newsgroups_coefw.py --partition dirichlet --dirichlet_alpha 0.5

--help lists all options. --config options.yaml reads them from a file.
"""

from hf_coefsfl.tasks.run import run

if __name__ == "__main__":
    run("newsgroups", method="coef_w", description=__doc__)
