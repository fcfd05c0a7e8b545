"""Spillway below programs that train by a YAML file: docs/integrations.md.

    python -m spillway.integrations.llamafactory train recipe.yaml     # LLaMA-Factory; the YAML as it is
    plugins: [spillway.integrations.axolotl.SpillwayPlugin]            # Axolotl; a line of its YAML
"""
