"""(map of this folder)"""
