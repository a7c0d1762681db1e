"""Image classification on Tiny-ImageNet with CoeF-W.

    accelerate launch recipes/tiny_imagenet_coefw.py

ViT-Tiny, cut after 4 of its 12 blocks; 50 clients, 10 % of them per round. timm's weights work too:

    accelerate launch recipes/tiny_imagenet_coefw.py --model_name_or_path timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k

--help lists all options. --config options.yaml reads them from a file.
"""

from hf_coefsfl.tasks.run import run

if __name__ == "__main__":
    run("tiny_imagenet", method="coef_w", description=__doc__)
