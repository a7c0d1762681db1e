"""Image classification on Food-101 with CoeF-W.

    accelerate launch recipes/food101_coefw.py

ViT-Tiny, cut after 4 of its 12 blocks; 50 clients, 10 % of them per round. With the larger model of the paper:

    accelerate launch recipes/food101_coefw.py --model_name_or_path google/vit-base-patch16-224

--help lists all options. --config options.yaml reads them from a file.
"""

from hf_coefsfl.tasks.run import run

if __name__ == "__main__":
    run("food101", method="coef_w", description=__doc__)
