"""Image classification on CIFAR-100 with CoeF-D, which needs no more traffic than the gradient itself.

    accelerate launch recipes/cifar100_coefd.py

ViT-Tiny, cut after 4 of its 12 blocks; 50 clients, 10 % of them a round. The paper's non-IID split, and images of your
own, in a folder with one sub-folder a class:

    accelerate launch recipes/cifar100_coefd.py --partition dirichlet --dirichlet_alpha 0.1
    accelerate launch recipes/cifar100_coefd.py --dataset_name my_images/ --augment true

All options: --help. They may also come from a file: accelerate launch recipes/cifar100_coefd.py options.yaml
"""

from hf_coefsfl.tasks.run import run

if __name__ == "__main__":
    run("cifar100", method="coef_d", description=__doc__)
