"""Image classification on CIFAR-100 with CoeF-W.

    accelerate launch recipes/cifar100_coefw.py

ViT-Tiny, cut after 4 of its 12 blocks; 50 clients, 10 % of them per round. The paper's non-IID split, and your
own images in a folder with one sub-folder per class:

    accelerate launch recipes/cifar100_coefw.py --partition dirichlet --dirichlet_alpha 0.1
    accelerate launch recipes/cifar100_coefw.py --dataset_name my_images/ --augment true

--help lists all options. --config options.yaml reads them from a file.
"""

from hf_coefsfl.tasks.run import run

if __name__ == "__main__":
    run("cifar100", method="coef_w", description=__doc__)
