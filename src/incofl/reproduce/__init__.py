"""The paper's experiments, each by one command: committed configs at three scales, and its numbers beside ours."""

from incofl.reproduce.study import SCALES, STUDIES, Scale, Study, load_scale, load_study

__all__ = ["SCALES", "STUDIES", "Scale", "Study", "load_scale", "load_study"]
