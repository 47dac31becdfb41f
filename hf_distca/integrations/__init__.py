"""Plugins of training programs that have their own configuration: axolotl and ms-swift."""
