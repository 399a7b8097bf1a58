"""The charts of the pages, as SVG."""
