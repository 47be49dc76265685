"""Trained models leave: as files of formats that other programs read."""
