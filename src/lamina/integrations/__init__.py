"""Lamina inside the tools that people already use: Hugging Face, Lightning, TensorBoard, W&B, MLflow.

Nothing here trains by itself: `lamina.Trainer` does, and these show its surface. Each module imports its package when it
is imported itself; `import lamina` imports none of them.
"""
