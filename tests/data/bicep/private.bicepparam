using '../../../infra/bicep/main.bicep'

param namespaceName = 'contoso-maintenance'
param forwardPrincipalIds = ['11111111-1111-1111-1111-111111111111']
param sku = 'Premium'
param publicNetworkAccess = 'Disabled'
param eventGridTopicName = 'Contoso-Maintenance'
param functionName = 'contoso-audit-of-the-scheduled-events-of-every-machine-there'
param functionStorageName = 'contosoaudit'
param functionSubnetId = '/subscriptions/0/resourceGroups/shop/providers/Microsoft.Network/virtualNetworks/shop/subnets/function'
param privateEndpointSubnetId = '/subscriptions/0/resourceGroups/shop/providers/Microsoft.Network/virtualNetworks/shop/subnets/endpoints'
param serviceBusDnsZoneId = '/subscriptions/0/resourceGroups/shop/providers/Microsoft.Network/privateDnsZones/privatelink.servicebus.windows.net'
param eventGridDnsZoneId = '/subscriptions/0/resourceGroups/shop/providers/Microsoft.Network/privateDnsZones/privatelink.eventgrid.azure.net'
