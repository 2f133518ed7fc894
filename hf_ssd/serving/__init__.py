"""An OpenAI endpoint whose model speculates, with figures and a page. Needs `pip install "hf_ssd[serve]"`."""
