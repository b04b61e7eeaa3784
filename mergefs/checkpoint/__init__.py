"""Reading Hugging Face model directories and the headers of safetensors files."""
