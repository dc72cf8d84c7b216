# Rscript regress_mgcv.R FRAME.csv GRID.csv FORMULA CURVES.csv gam|bam
# Fits FORMULA by restricted maximum likelihood; the last line is the seconds of the fit.
suppressMessages(library(mgcv))
arguments <- commandArgs(trailingOnly = TRUE)
frame <- read.csv(arguments[1])
grid <- read.csv(arguments[2])
formula <- as.formula(arguments[3])
begun <- proc.time()[3]
if (arguments[5] == "bam") {
  model <- bam(formula, data = frame, method = "fREML", discrete = TRUE)
} else {
  model <- gam(formula, data = frame, method = "REML")
}
seconds <- proc.time()[3] - begun
found <- predict(model, grid, type = "terms", se.fit = TRUE)
write.csv(cbind(found$fit, found$se.fit), arguments[4], row.names = FALSE)
cat(as.character(packageVersion("mgcv")), seconds, "\n")
