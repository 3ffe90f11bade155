"""ONNX exports: a traced graph whose linear layers are operators over the codes of the artifact."""
